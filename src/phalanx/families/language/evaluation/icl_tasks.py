"""In-context tasks as LLM Foundry writes them: JSON lines, few-shot examples, delimiters, and the prompts they make.

Knows text alone; `in_context` tokenizes and scores. Facts: mosaicml/llm-foundry, llmfoundry/eval/datasets (Apache-2.0).
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phalanx.errors import ConfigError, DataError
from phalanx.families.language.config import LanguageRun
from phalanx.remote_files import local_path

TaskKind = Literal["multiple_choice", "language_modeling", "schema", "generation_task_with_answers"]
_NEEDED: dict[TaskKind, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
    "generation_task_with_answers": ("context", "answer"),
}
"""Fields that a row of each kind has, in the order in which a file's kind is looked for."""
Row = dict[str, Any]


class TaskSettings(BaseModel):
    """One entry of Foundry's `icl_tasks`, under Foundry's own names and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    dataset_uri: str
    icl_task_type: TaskKind
    num_fewshot: list[int] = Field(default=[0], min_length=1)
    prompt_string: str = ""
    example_delimiter: str = "\n"
    continuation_delimiter: str = " "
    question_prelimiter: str = ""
    cot_delimiter: str = ""
    early_stopping_criteria: list[str] = []
    fewshot_random_seed: int = 1234
    do_normalization: bool = True
    has_categories: bool = False
    post_processing_funcs: list[dict[str, str]] = []

    @model_validator(mode="after")
    def _check_processing(self) -> Self:
        # What it names is done already where do_normalization is left on.
        if any(function != {"name": "qa_normalization"} for function in self.post_processing_funcs):
            raise ValueError(f"post_processing_funcs={self.post_processing_funcs}: only qa_normalization is known")
        if any(shots < 0 for shots in self.num_fewshot):
            raise ValueError(f"num_fewshot={self.num_fewshot} must be 0 or more")
        return self


@dataclass(frozen=True)
class Prompt:
    """What a model is given for one question, before it is tokenized."""

    preamble: str
    """Text in front of the question: instructions and examples."""
    contexts: tuple[str, ...]
    """Ends of the prompt: one, or one a candidate where candidates differ before the continuation (schema)."""
    continuations: tuple[str, ...]
    """Candidates that follow; one for language modelling and schema, none for generation."""
    gold: int
    """Which candidate is right; 0 where there is one."""
    answers: tuple[str, ...]
    """Texts that count as right for generation."""


@dataclass(frozen=True)
class Task:
    """Rows of one task, with one number of examples."""

    name: str
    settings: TaskSettings
    shots: int
    rows: tuple[Row, ...]

    @property
    def kind(self) -> TaskKind:
        """Return what kind of question the task asks."""
        return self.settings.icl_task_type

    def prompts(self, limit: int | None = None) -> list[Prompt]:
        """Return the prompts of the first `limit` questions; the draws of examples do not depend on `limit`."""
        draw = random.Random(self.settings.fewshot_random_seed)
        return [self._make_prompt(index, draw) for index in range(len(self.rows))[:limit]]

    def answer_text(self, row: Row, answer: str) -> str:
        """Return an answer of a generation row as an example shows it: after its reasoning, where the file has any."""
        if any("chain_of_thought" in other for other in self.rows):
            return f"{row.get('chain_of_thought', '')}{self.settings.cot_delimiter}{answer}"
        return answer

    def _make_prompt(self, index: int, draw: random.Random) -> Prompt:
        row, preamble = self.rows[index], self.settings.prompt_string
        if self.shots:
            for place in _draw_examples(len(self.rows), self.shots, index, draw):
                preamble += self._example(self.rows[place], preamble)
        gold = int(row.get("gold", 0))
        match self.kind:
            case "schema":
                # The prelimiter comes before the delimiter, and the latter only with examples: as Foundry scores it.
                before, after = self.settings.question_prelimiter, ""
                if preamble:
                    before += self.settings.example_delimiter
                    after = self.settings.continuation_delimiter.rstrip()
                contexts = tuple(f"{before}{option}{after}" for option in row["context_options"])
                return Prompt(preamble, contexts, (row["continuation"],), gold, ())
            case "multiple_choice":
                # A prompt that ends in a space would cut the word that follows in another place than training did.
                context = self._question(row["query"], preamble).rstrip()
                return Prompt(preamble, (context,), tuple(row["choices"]), gold, ())
            case "language_modeling":
                return Prompt(
                    preamble, (self._question(row["context"], preamble).rstrip(),), (row["continuation"],), 0, ()
                )
        answers = tuple(dict.fromkeys([row["answer"], *row.get("aliases", [])]))
        return Prompt(preamble, (self._question(row["context"], preamble).rstrip(),), (), 0, answers)

    def _question(self, text: str, preamble: str) -> str:
        between = self.settings.example_delimiter if preamble else ""
        return f"{between}{self.settings.question_prelimiter}{text}{self.settings.continuation_delimiter}"

    def _example(self, row: Row, preamble: str) -> str:
        match self.kind:
            case "schema":
                between = self.settings.example_delimiter if preamble else ""
                context = f"{self.settings.question_prelimiter}{between}{row['context_options'][row['gold']]}"
                return f"{context}{self.settings.continuation_delimiter}{row['continuation']}"
            case "multiple_choice":
                return f"{self._question(row['query'], preamble)}{row['choices'][row['gold']]}"
            case "language_modeling":
                return f"{self._question(row['context'], preamble)}{row['continuation']}"
        return f"{self._question(row['context'], preamble)}{self.answer_text(row, row['answer'])}"


def load_tasks(paths: Sequence[Path], shots: int | None = None, *, named: str = "--tasks") -> list[Task]:
    """Read task files (.jsonl, .jsonl.gz) and lists of tasks (.yaml with `icl_tasks`, as Foundry has them).

    shots: examples in front of each question, in place of what a list says (0 for a file alone). A file alone is of the
    kind that its fields say, with Foundry's default delimiters. named: the option or field that names the paths. Raises
    ConfigError for a list or a file that is not one.
    """
    found: list[Task] = []
    for path in paths:
        if path.suffix in (".yaml", ".yml"):
            for settings in _read_list(path, named):
                uri, kind = settings.dataset_uri, settings.icl_task_type
                # Foundry's paths are relative to the folder it is started in, which lies above the list.
                places = (folder / uri for folder in path.resolve().parents)
                file = next((place for place in places if place.is_file()), None)
                if file is None:
                    raise ConfigError(
                        f"{named} {path}: dataset_uri={uri} is in no folder above the list; put the file there"
                    )
                rows = _read_rows(file, named)
                missing = [name for name in _NEEDED[kind] if name not in rows[0]]
                if missing:
                    raise DataError(f"{file}: rows of a {kind} task need {', '.join(missing)}")
                found += _split_task(settings, rows, shots)
        else:
            rows = _read_rows(path, named)
            kinds = [kind for kind, names in _NEEDED.items() if all(name in rows[0] for name in names)]
            if not kinds:
                needed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in _NEEDED.items())
                raise DataError(f"{path}: rows with {', '.join(rows[0])} are no task that can be scored ({needed})")
            settings = TaskSettings(label=path.name.split(".")[0], dataset_uri=str(path), icl_task_type=kinds[0])
            found += _split_task(settings, rows, shots)
    return found


def _read_list(path: Path, named: str) -> list[TaskSettings]:
    try:
        read = yaml.safe_load(path.read_text())
        tasks = read["icl_tasks"]
        for task in tasks:
            if isinstance(task.get("num_fewshot"), int):
                task["num_fewshot"] = [task["num_fewshot"]]
        return [TaskSettings(**task) for task in tasks]
    except OSError as error:
        raise ConfigError(f"{named} {path}: {error.strerror}; give a .jsonl file or a .yaml list of tasks") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the task"
        raise ConfigError(f"{named} {path}: {where}: {first['msg']}; write it as LLM Foundry's icl_tasks") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{named} {path} has no list `icl_tasks`; write it as LLM Foundry does") from None


def _split_task(settings: TaskSettings, rows: Sequence[Row], shots: int | None) -> list[Task]:
    parts = {settings.label: tuple(rows)}
    if settings.has_categories:
        # Examples come from a question's own category.
        names = dict.fromkeys(str(row.get("category", "none")) for row in rows)
        parts = {f"{settings.label}/{n}": tuple(r for r in rows if str(r.get("category", "none")) == n) for n in names}
    counts = settings.num_fewshot if shots is None else [shots]
    return [Task(name, settings, count, part) for count in counts for name, part in parts.items()]


def _read_rows(path: Path, named: str) -> list[Row]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            read = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise ConfigError(f"{named} {path}: {error.strerror or error}; give a .jsonl file of questions") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}; every line must be one JSON object") from None
    if not read or not all(isinstance(row, dict) for row in read):
        raise DataError(f"{path} holds no questions; every line must be one JSON object")
    # Outer texts alone are stripped; candidates stay as they are.
    return [{name: text.strip() if isinstance(text, str) else text for name, text in row.items()} for row in read]


def _draw_examples(rows: int, shots: int, index: int, draw: random.Random) -> set[int]:
    """Draw the examples of question `index`, never itself; the order is that of a set of integers, as in Foundry."""
    count = min(rows - 1, shots)
    places = set(draw.sample(range(rows), count))
    if index in places:
        places.remove(index)
        if len(places) >= rows - 1:
            return places
        while (other := draw.choice(range(rows))) in places or other == index:
            pass
        places.add(other)
    return places


def load_run_tasks(run: LanguageRun) -> list[Task]:
    """Read the tasks of `evaluation.tasks`; none where it is not asked for. Raises as `load_tasks` does."""
    asked = run.evaluation.tasks
    if asked is None:
        return []
    paths: list[Path] = [local_path(file) for file in asked.files]
    return load_tasks(paths, asked.shots, named="evaluation.tasks.files")
