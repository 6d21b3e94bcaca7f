"""Sample text and tasks: the source text of some packages of Python's standard library, and questions about others.

The text is under the PSF licence, and on every machine that runs Phalanx. Tasks are of the four kinds, and in the form, of
LLM Foundry's files: one JSON object a line. None is taken from the packages of the sample text.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.data.prepared_folder import Progress, SampleManifest, write_sample
from phalanx.families.language.data.prepare_text import Options, prepare_text
from phalanx.families.language.data.token_shards import Manifest

PACKAGES = (
    *("asyncio", "collections", "concurrent", "ctypes", "email", "html", "http", "importlib", "json", "logging"),
    *("multiprocessing", "sqlite3", "tkinter", "unittest", "urllib", "wsgiref", "xml", "xmlrpc"),
)
VOCABULARY = 2048
TASKS = ("last_word.jsonl", "which_module.jsonl", "which_function.jsonl", "sums.jsonl")
_CHOICES = 4


def write_text(
    folder: Path, *, workers: int | None = None, progress: Progress = lambda what, done, total: None
) -> Manifest:
    """Tokenize the sample text into `folder`, with a tokenizer of its own; see `prepare_text`."""
    root = Path(sysconfig.get_path("stdlib"))
    # Some builds leave packages out.
    inputs = [str(root / name) for name in PACKAGES if (root / name).is_dir()]
    options = Options(vocab_size=VOCABULARY, validation_fraction=0.05)
    return prepare_text(inputs, folder, options, workers=workers, progress=progress)


def write_tasks(folder: Path, *, questions: int = 200, seed: int = 0) -> SampleManifest:
    """Write the four task files, up to `questions` lines each, into `folder` and return its record.

    The same seed gives the same bytes with the same Python. Raises DataError where files are already there.
    """
    functions = _documented_functions()

    def make(target: Path) -> None:
        for name, build in zip(TASKS, (_last_word, _which_module, _which_function, _sum), strict=True):
            # A generator for each file: more of one kind changes nothing of another.
            chance = random.Random(f"{seed} {name}")
            asked = chance.sample(functions, min(questions, len(functions)))
            lines = [json.dumps(build(function, functions, chance)) for function in asked]
            (target / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    return write_sample(folder, "icl", seed, TASKS, make)


@dataclass(frozen=True)
class _Function:
    """A function of a module and the first sentence of what it says it does."""

    module: str
    name: str
    signature: str
    text: str


@cache
def _documented_functions() -> list[_Function]:
    """Return public functions of single-file modules that begin with a sentence of five words or more, by module."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            sentence = re.split(r"(?<=\.)\s|\n\s*\n", ast.get_docstring(node) or "", maxsplit=1)[0]
            text = " ".join(sentence.split())
            if len(text.split()) >= 5 and len(text) <= 200:
                found.append(_Function(path.stem, node.name, f"def {node.name}({ast.unparse(node.args)}):", text))
    return found


def _last_word(function: _Function, others: list[_Function], chance: random.Random) -> dict[str, Any]:
    """Return a language-modelling question: the last word of a sentence."""
    context, _, word = function.text.rpartition(" ")
    return {"context": f"{function.signature}\n    {context}", "continuation": word}


def _which_module(function: _Function, others: list[_Function], chance: random.Random) -> dict[str, Any]:
    """Return a multiple-choice question: the module of a function."""
    modules = sorted({other.module for other in others} - {function.module})
    choices = [*chance.sample(modules, _CHOICES - 1), function.module]
    chance.shuffle(choices)
    query = f"{function.signature}\n    {function.text}\nThe module of {function.name} is"
    return {"query": query, "choices": choices, "gold": choices.index(function.module)}


def _which_function(function: _Function, others: list[_Function], chance: random.Random) -> dict[str, Any]:
    """Return a schema question: the signature that a sentence follows."""
    other = chance.choice([one for one in others if one.name != function.name])
    options = [function.signature, other.signature]
    chance.shuffle(options)
    return {"context_options": options, "continuation": function.text, "gold": options.index(function.signature)}


def _sum(function: _Function, others: list[_Function], chance: random.Random) -> dict[str, Any]:
    """Return a question whose answer is generated: a sum of two numbers."""
    first, second = chance.randrange(100), chance.randrange(100)
    return {"context": f"{first} + {second} =", "answer": str(first + second), "aliases": [str(first + second)]}
