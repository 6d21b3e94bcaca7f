"""How easy the source is to live in, measured: sizes, names, comments, folders, imports, and the calls a reader follows.

    python benchmarks/house.py [--json]

Counts come from the syntax trees of `src/phalanx`. The two walks are real calls: a tiny run is trained and planned on the
CPU, and every function of the package that is entered on the way is noted, from the run file to the training loop's first
step, and from the run file to the ranked layouts.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "phalanx"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Dotted name, as in imports."""
        parts = self.path.relative_to(SOURCE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def functions(self) -> list[FunctionNode]:
        """Return every function and method, nested ones included."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FunctionNode)]


def read_modules() -> list[Module]:
    """Read all source files."""
    found = sorted(SOURCE.rglob("*.py"))
    return [Module(path, text := path.read_text(), ast.parse(text)) for path in found]


def measure_sizes(modules: list[Module]) -> dict[str, Any]:
    """Count files and lines, and the lengths of functions."""
    lengths = [node.end_lineno - node.lineno + 1 for m in modules for node in m.functions if node.end_lineno]
    return {
        "files": len(modules),
        "lines": sum(m.text.count("\n") for m in modules),
        "functions": len(lengths),
        "median_function_lines": statistics.median(lengths),
        "share_of_functions_up_to_3_lines": round(sum(n <= 3 for n in lengths) / len(lengths), 3),
        "functions_over_60_lines": sum(n > 60 for n in lengths),
    }


def measure_names(modules: list[Module]) -> dict[str, Any]:
    """Count names of one word among module-level functions, and private functions that one place alone uses."""
    top = [node.name for m in modules for node in m.tree.body if isinstance(node, FunctionNode)]
    single = [name for name in top if "_" not in name.strip("_")]
    used_once = private = 0
    for module in modules:
        words = Counter(re.findall(r"\w+", module.text))
        own = [node.name for node in module.functions if re.match(r"_[a-z]", node.name)]
        private += len(own)
        used_once += sum(words[name] == 2 for name in own)
    stems = Counter(m.path.name for m in modules if m.path.name != "__init__.py")
    repeated = {name: count for name, count in stems.items() if count > 1}
    return {
        "module_level_functions": len(top),
        "share_of_one_word_names": round(len(single) / len(top), 3),
        "private_functions": private,
        "private_functions_used_once": used_once,
        "file_names_that_repeat": len(repeated),
        "files_with_such_a_name": sum(repeated.values()),
    }


def measure_comments(modules: list[Module]) -> dict[str, Any]:
    """Count `#` comments a line of code; docstrings, blank lines and tool directives count as neither."""
    comments = code = 0
    for module in modules:
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.COMMENT:
                comments += not re.match(r"#\s*(noqa|type:|pragma|!)", token.string)
            elif token.type not in (
                tokenize.NL,
                tokenize.NEWLINE,
                tokenize.INDENT,
                tokenize.DEDENT,
                tokenize.ENDMARKER,
            ):
                lines.update(range(token.start[0], token.end[0] + 1))
        code += len(lines - set(docstring_lines(module.tree)))
    return {"code_lines": code, "comments": comments, "comments_a_code_line": round(comments / code, 4)}


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of strings that stand alone: docstrings and notes of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def measure_folders(modules: list[Module]) -> dict[str, Any]:
    """Count files a folder."""
    counts = Counter(
        m.path.parent.relative_to(SOURCE.parent).as_posix() for m in modules if m.path.name != "__init__.py"
    )
    return {
        "folders": len(counts),
        "largest_folder": counts.most_common(1)[0],
        "folders_over_15_files": {name: count for name, count in counts.most_common() if count > 15},
    }


def read_order() -> dict[str, int]:
    """Read the floors of rooms from the line of docs/architecture.md that says which way imports point; 0 is the top."""
    line = re.search(r"Imports point one way: `([^`]+)`", ARCHITECTURE.read_text())
    assert line is not None, f"{ARCHITECTURE} no longer says which way imports point"
    floors = [re.findall(r"[\w.*]+", floor) for floor in line[1].split("->")]
    return {room: number for number, rooms in enumerate(floors) for room in rooms}


def room_of(module: str, order: dict[str, int]) -> str | None:
    """Return the room of the order that a module `phalanx.a.b` is in: the longest name that fits; None for others."""
    inner = module.removeprefix("phalanx.")
    fits = [room for room in order if inner == room or inner.startswith(f"{room}.")]
    fits = fits or [room for room in order if inner.partition(".")[0].startswith(room)]
    return max(fits, key=len, default=None)


def upward_imports(modules: list[Module]) -> list[str]:
    """Return every import of a room above the importer's, by the order of docs/architecture.md."""
    order = read_order()
    found = []
    for module in modules:
        here = room_of(module.name, order)
        for node in ast.walk(module.tree):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                there = room_of(name, order) if name.startswith("phalanx.") else None
                if here and there and order[there] < order[here]:
                    found.append(f"{module.name} -> {name}")
    return sorted(set(found))


@dataclass
class Walk:
    """The way of the run: calls that hand it, whole, from one module of the package to a function of another."""

    order: dict[str, int]
    run_type: type
    route: list[str] = field(default_factory=list)
    """Functions, each as often as another function hands it the run for the first time."""
    upward: set[str] = field(default_factory=set)
    """Calls of a room above the caller's, as through a table of functions."""
    pairs: set[tuple[object, object]] = field(default_factory=set)
    walking: bool = False

    def note(self, frame: FrameType) -> None:
        """Take a call into account, once for each caller and callee."""
        caller = frame.f_back
        if not self.walking or caller is None or (caller.f_code, frame.f_code) in self.pairs:
            return
        here, there = (str(f.f_globals.get("__name__", "")) for f in (caller, frame))
        if not there.startswith("phalanx.") or here == there:
            return
        if not any(isinstance(value, self.run_type) for value in frame.f_locals.values()):
            return
        self.pairs.add((caller.f_code, frame.f_code))
        stop = f"{there}:{frame.f_code.co_qualname}"
        self.route.append(stop)
        rooms = [room_of(module, self.order) for module in (here, there)]
        if None not in rooms and self.order[str(rooms[1])] < self.order[str(rooms[0])]:
            self.upward.add(f"{here} -> {stop}")

    def summary(self) -> dict[str, Any]:
        """Return the counts; a return is a stop in a module that the run had left before."""
        modules = [stop.partition(":")[0] for stop in self.route]
        left = [m for m, before in zip(modules[1:], modules, strict=False) if m != before]
        return {
            "stops": len(self.route),
            "modules": len(set(modules)),
            "returns": len(left) - len(set(left)),
            "upward": len(self.upward),
        }


class Arrived(BaseException):
    """The walk is where it leads."""


def walk_command(words: list[str], end: tuple[str, str]) -> Walk:
    """Follow `phalanx WORDS` from reading the run file to the function `end`, a module and a qualified name."""
    from phalanx.cli.main import run_command_line  # noqa: PLC0415 - after the checkout's sources are on the path
    from phalanx.config.schema import Run  # noqa: PLC0415

    walk = Walk(read_order(), Run)

    def watch(frame: FrameType, event: str, _argument: object) -> None:
        where = (str(frame.f_globals.get("__name__", "")), frame.f_code.co_qualname)
        if event == "call" and where == ("phalanx.config.load", "load_run"):
            walk.walking = True
        if event == "call" and where == end and walk.walking:
            walk.walking = False
            raise Arrived
        if event == "call":
            walk.note(frame)

    sys.setprofile(watch)
    try:
        # The walk ends in the middle of the command, where it has arrived.
        with suppress(Arrived):
            run_command_line(words)
    finally:
        sys.setprofile(None)
    return walk


def walk_train(folder: Path, loop: tuple[str, str]) -> Walk:
    """Follow `phalanx train` of a tiny decoder to the training loop."""
    sys.path.insert(0, str(ROOT / "tests"))
    from token_data import write_run_file, write_token_folder  # noqa: PLC0415 - the tests' own small data

    run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))
    return walk_command(["train", str(run_file), "--run-dir", str(folder / "run")], loop)


def walk_plan(_folder: Path, printed: tuple[str, str]) -> Walk:
    """Follow `phalanx plan` of 175B parameters on 1,024 devices to the function that prints the ranking."""
    words = ["plan", str(ROOT / "examples" / "gpt-175b.yaml"), "--cluster", "frontier", "--devices", "1024"]
    return walk_command(words, printed)


WALKS: dict[str, tuple[Callable[[Path, tuple[str, str]], Walk], tuple[str, str]]] = {
    "train": (walk_train, ("phalanx.training.trainer", "Trainer.train")),
    "plan": (walk_plan, ("phalanx.cli.planning.plan_text", "write_plan_lines")),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--walk", choices=WALKS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    if chosen.walk:
        follow, end = WALKS[chosen.walk]
        with tempfile.TemporaryDirectory() as folder:
            walk = follow(Path(folder), end)
        print(json.dumps({**walk.summary(), "route": walk.route, "upward_calls": sorted(walk.upward)}))
        return
    modules = read_modules()
    upward = upward_imports(modules)
    found = {
        **measure_sizes(modules),
        **measure_names(modules),
        **measure_comments(modules),
        **measure_folders(modules),
        "upward_imports": len(upward),
        "which_upward_imports": upward,
    }
    for name in WALKS:
        # A process of its own: a walk ends in the middle of things.
        command = [sys.executable, __file__, "--walk", name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        found[f"walk_{name}"] = json.loads(printed)
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    for name, value in found.items():
        shown = {k: v for k, v in value.items() if isinstance(v, int)} if name.startswith("walk_") else value
        print(f"{name:36} {shown}")


if __name__ == "__main__":
    main()
