"""Text of others on a terminal: shown, and kept from acting."""

import io

from rich.table import Table
from rich.text import Text

from phalanx.printable import PrintableConsole, make_printable


def test_what_would_act_is_written_out() -> None:
    assert make_printable("\x1b[31m\x07\r\x00\x9b1m") == "␛[31m␇␍␀\\u009b1m"
    assert make_printable("a\u202eb\u2066") == "a\\u202eb\\u2066"
    assert make_printable("half \ud83d").encode() == b"half \\ud83d"


def test_what_is_shown_stays() -> None:
    text = "Zeile\n\tTab äöü 北京 👩\u200d🚀 −∞"
    assert make_printable(text) == text and make_printable(make_printable("\x1b\x7f")) == "␛␡"


def test_no_way_of_printing_lets_a_text_act() -> None:
    table = Table("\x1b[1mhead")
    table.add_row("\x1b]0;title\x07", Text("cell\x1b[2J"))
    for thing in ("plain\x1b[31m", Text("text\x1b[31m", style="bold"), table):
        stream = io.StringIO()
        PrintableConsole(file=stream, force_terminal=False, width=80).print(thing)
        assert "\x1b" not in stream.getvalue() and "\x07" not in stream.getvalue() and "␛" in stream.getvalue()


def test_colours_of_our_own_stay() -> None:
    stream = io.StringIO()
    PrintableConsole(file=stream, force_terminal=True, color_system="standard", width=80).print(
        Text("x\x1b", style="red")
    )
    assert "\x1b[31mx␛\x1b[0m" in stream.getvalue()
