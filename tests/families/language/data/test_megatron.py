import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from foreign_tokens import MEGATRON_FLAT as FLAT
from foreign_tokens import SEQUENCES, write_megatron
from phalanx.errors import DataError
from phalanx.families.language.data.megatron import MegatronSource, megatron_prefix, megatron_split


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_reads_the_sequences_in_order(tmp_path: Path, dtype: str) -> None:
    source = MegatronSource(write_megatron(tmp_path / "text_document", dtype=dtype))
    assert source.tokens == len(FLAT)
    assert (source.vocab_size, source.text_bytes, source.tokenizer, source.end_of_document) == (None,) * 4
    rows = source.read(np.array([0, 2, 6]), 4)
    assert rows.dtype == np.int64
    assert rows.tolist() == [FLAT[0:4], FLAT[2:6], FLAT[6:10]]
    source.verify()


def test_documents_may_hold_several_sequences(tmp_path: Path) -> None:
    source = MegatronSource(write_megatron(tmp_path / "text", documents=[0, 2, 2, 3, 4]))
    found = source.document_of(np.arange(10).reshape(2, 5))
    assert found.shape == (2, 5)
    same = np.diff(found.ravel()) == 0
    assert same.tolist() == [True, True, True, False, True, True, True, False, True]
    assert (np.diff(found.ravel()) >= 0).all()


def test_holds_more_ids_than_16_bits(tmp_path: Path) -> None:
    source = MegatronSource(write_megatron(tmp_path / "text", [[128_000, 3]], dtype="int32"))
    assert source.read(np.array([0]), 2).tolist() == [[128_000, 3]]


def test_an_empty_pair_has_no_tokens(tmp_path: Path) -> None:
    source = MegatronSource(write_megatron(tmp_path / "text", []))
    assert source.tokens == 0
    assert source.samples(8) == 0
    source.verify()


def test_prefix_is_found_with_and_without_ending(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "my.text_document")
    for name in ("my.text_document", "my.text_document.bin", "my.text_document.idx"):
        assert megatron_prefix(tmp_path / name) == prefix
    assert megatron_prefix(tmp_path / "my") is None


@pytest.mark.parametrize("ending", ["_validation", "_valid", "_val"])
def test_validation_is_a_sibling(tmp_path: Path, ending: str) -> None:
    prefix = write_megatron(tmp_path / "text")
    assert megatron_split(prefix, "train") == prefix
    assert megatron_split(prefix, "validation") is None
    sibling = write_megatron(tmp_path / f"text{ending}")
    assert megatron_split(prefix, "validation") == sibling


def test_fingerprint_tells_data_apart(tmp_path: Path) -> None:
    def fingerprint(sequences: list[list[int]], documents: list[int] | None = None, dtype: str = "uint16") -> str:
        return MegatronSource(write_megatron(tmp_path / "text", sequences, documents, dtype)).fingerprint

    assert fingerprint(SEQUENCES) == fingerprint(SEQUENCES)
    others = [
        fingerprint([[5, 6, 7], [8], [9, 10, 11, 12], [13, 15]]),
        fingerprint([[5, 6], [7, 8], [9, 10, 11, 12], [13, 14]]),
        fingerprint(SEQUENCES, [0, 1, 4]),
        fingerprint(SEQUENCES, dtype="int16"),
    ]
    assert len({fingerprint(SEQUENCES), *others}) == 5


def patch(ending: str, at: int, content: bytes) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}{ending}")
        old = path.read_bytes()
        path.write_bytes(old[:at] + content + old[at + len(content) :])

    return change


def cut(ending: str, size: int) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}{ending}")
        path.write_bytes(path.read_bytes()[:size])

    return change


def grow(ending: str, by: bytes) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        with Path(f"{prefix}{ending}").open("ab") as file:
            file.write(by)

    return change


def remove(ending: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}{ending}").unlink()


LENGTHS, POINTERS, DOCUMENTS = 34, 34 + 4 * 4, 34 + 12 * 4
INDEX_SIZE = DOCUMENTS + 8 * 5


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove(".idx"), r"text\.idx: No such file or directory; Megatron data is a \.bin and an \.idx side by side"),
        (remove(".bin"), r"text\.bin: No such file or directory; text\.idx lies beside it"),
        (cut(".idx", 20), r"text\.idx: 20 bytes found, at least 34 expected; the file is truncated"),
        (cut(".idx", 100), rf"text\.idx: 100 bytes found, {INDEX_SIZE} expected for 4 sequences and 5 document"),
        (grow(".idx", bytes(4)), rf"text\.idx: {INDEX_SIZE + 4} bytes found, {INDEX_SIZE} expected .*multimodal"),
        (patch(".idx", 0, b"TNTIDX"), r"text\.idx: begins with b'TNTIDX.*no Megatron index"),
        (patch(".idx", 9, b"\x02"), r"text\.idx: version 2 found, 1 expected"),
        (patch(".idx", 17, b"\x06"), r"text\.idx: type code 6 \(float64\) found; token ids are uint8, int8"),
        (patch(".idx", 17, b"\x63"), r"text\.idx: type code 99 \(unknown\) found"),
        (patch(".idx", 17, b"\x04"), r"text\.idx: sequence 1 has 1 tokens from byte 6, byte 12 expected"),
        (cut(".bin", 18), r"text\.bin: 18 bytes found, 20 expected by text\.idx"),
        (grow(".bin", b"\0"), r"text\.bin: 21 bytes found, 20 expected by text\.idx"),
        (patch(".idx", LENGTHS, struct.pack("<i", -3)), r"sequence 0 has -3 tokens"),
        (patch(".idx", POINTERS + 16, struct.pack("<q", 10)), r"sequence 2 has 4 tokens from byte 10, byte 8 expected"),
        (patch(".idx", DOCUMENTS + 8, struct.pack("<q", 3)), r"document indices must rise from 0 to 4"),
        (patch(".idx", DOCUMENTS, struct.pack("<q", 1)), r"document indices must rise from 0 to 4"),
        (patch(".idx", DOCUMENTS + 32, struct.pack("<q", 9)), r"document indices must rise from 0 to 4"),
    ],
)
def test_damage_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    prefix = write_megatron(tmp_path / "text")
    damage(prefix)
    with pytest.raises(DataError, match=message):
        MegatronSource(prefix)


def test_verify_finds_negative_ids_and_later_truncation(tmp_path: Path) -> None:
    source = MegatronSource(write_megatron(tmp_path / "text", [[1, 2], [3, -4]], dtype="int32"))
    with pytest.raises(DataError, match=r"text\.bin: token 3 is -4, below 0"):
        source.verify()
    whole = MegatronSource(write_megatron(tmp_path / "other"))
    cut(".bin", 10)(tmp_path / "other")
    with pytest.raises(DataError, match=r"other\.bin: 10 bytes found, 20 expected"):
        whole.verify()
