"""In-context scores against their definition, prompts as LLM Foundry writes them, and shares of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.errors import ConfigError, DataError
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.evaluation.held_out import WHOLE, Sharing
from phalanx.families.language.evaluation.icl_tasks import Prompt, Task, TaskSettings, load_tasks
from phalanx.families.language.evaluation.in_context import (
    Candidate,
    TaskScore,
    matches_answer,
    score_candidates,
    score_tasks,
    tokenize_candidates,
)
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.families.language.huggingface.folder_files import SpecialTokens
from small_models import FAMILIES, READER, byte_tokenizer, random_decoder

CHOICES: list[dict[str, object]] = [
    {"query": f"Q: {index} and 2?  ", "choices": ["one", "a longer choice", "no"], "gold": index % 3}
    for index in range(7)
]
SCHEMA = [
    {"context_options": ["the cat", "a big dog"], "continuation": "ran.", "gold": 1},
    {"context_options": ["Anna", "Bert and Carl"], "continuation": "sang well.", "gold": 0},
]
TEXTS = [{"context": "one two", "continuation": "three"}, {"context": "four", "continuation": "five six"}]
ANSWERS = [{"context": f"Say {word}.", "answer": word, "aliases": [f"The {word}!"]} for word in ("yes", "no", "ten")]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def task_of(rows: list[dict[str, object]], kind: str, shots: int = 0, **settings: object) -> Task:
    fields = {"label": "t", "dataset_uri": "t.jsonl", "icl_task_type": kind, **settings}
    return Task("t", TaskSettings.model_validate(fields), shots, tuple(rows))


def reader() -> TextTokenizer:
    return TextTokenizer(byte_tokenizer(), SpecialTokens(end=(0,)))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    yield LoadedModel(random_decoder(READER, dtype=torch.float64).double(), None, reader(), Path("here"), 0)


def by_definition(model: Decoder, candidate: Candidate) -> tuple[float, bool]:
    """Loss and greedy match of one candidate, token by token."""
    ids, nats, greedy = list(candidate.context), 0.0, True
    for token in candidate.targets:
        logits = model.logits(torch.tensor([ids]))[0, -1].double()
        nats -= float(logits.log_softmax(-1)[token])
        greedy &= int(logits.argmax()) == token
        ids.append(token)
    return nats, greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_and_filling_change_no_score(family: str) -> None:
    model = random_decoder(FAMILIES[family], dtype=torch.float64).double().eval()
    draw = torch.Generator().manual_seed(3)
    candidates = []
    for _ in range(12):
        before, after = (int(torch.randint(1, high, (), generator=draw)) for high in (30, 6))
        ids = torch.randint(97, (before + after,), generator=draw).tolist()
        candidates.append(Candidate(tuple(ids[:before]), tuple(ids[before:]), 1))
    greedy = Candidate((5, 6), (int(model.logits(torch.tensor([[5, 6]]))[0, -1].argmax()),), 1)
    candidates.append(greedy)
    batched, likeliest = score_candidates(model, candidates, batch_tokens=200)
    alone, _ = score_candidates(model, candidates, batch_tokens=1)
    expected = [by_definition(model, candidate) for candidate in candidates]
    torch.testing.assert_close(batched, alone, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        batched, torch.tensor([nats for nats, _ in expected], dtype=torch.float64), rtol=1e-10, atol=0
    )
    assert likeliest.tolist() == [match for _, match in expected]
    assert likeliest[-1]


def test_examples_and_delimiters_stand_where_foundry_puts_them() -> None:
    (first, *_) = task_of(
        TEXTS, "language_modeling", 1, continuation_delimiter="\nA: ", question_prelimiter="Q: "
    ).prompts()
    assert first == Prompt("Q: four\nA: five six", ("\nQ: one two\nA:",), ("three",), 0, ())
    (first, *_) = task_of(SCHEMA, "schema", 1).prompts()
    assert first == Prompt("Anna sang well.", ("\nthe cat", "\na big dog"), ("ran.",), 1, ())
    (first, *_) = task_of(SCHEMA, "schema").prompts()
    assert first.contexts == ("the cat", "a big dog")
    (first, *_) = task_of(CHOICES[:1], "multiple_choice", 3, prompt_string="Do: ").prompts()
    assert first == Prompt("Do: ", ("\nQ: 0 and 2?",), ("one", "a longer choice", "no"), 0, ())


def test_a_question_is_never_its_own_example_and_limits_change_no_draw() -> None:
    task = task_of(CHOICES, "multiple_choice", 3)
    prompts = task.prompts()
    for index, prompt in enumerate(prompts):
        assert prompt.preamble.count("Q:") == 3
        assert f"Q: {index} and" not in prompt.preamble
    assert task.prompts(4) == prompts[:4]
    assert len({prompt.preamble for prompt in prompts}) > 1


def test_candidates_are_words_of_their_own_and_long_prompts_lose_their_beginning() -> None:
    tokens = reader()
    prompt = Prompt("xyz ", ("abc abc abc:",), ("one", " two"), 0, ())
    one, two = tokenize_candidates(tokens, prompt, 64)
    assert tokens.decode(one.context) == "xyz abc abc abc:"
    spaced = len(tokens.encode(" a")) == 1
    assert [tokens.decode(one.targets), tokens.decode(two.targets)] == [" one" if spaced else "one", " two"]
    assert one.characters == 3
    room = len(one.targets) + 4
    cut = tokenize_candidates(tokens, Prompt("", ("abc abc abc:",), ("one",), 0, ()), room)[0]
    assert cut.context == one.context[-4:]
    with pytest.raises(DataError, match="does not fit"):
        tokenize_candidates(tokens, prompt, len(one.targets))


def test_the_right_candidate_is_that_of_the_lowest_mean_loss(loaded: LoadedModel) -> None:
    words = ["o", "an of", "xyzz", "the", "!?", "copy the", "and and"]
    rows = [
        {"query": f"Q: {word}?", "choices": [word, words[place - 1], words[place - 2] + words[place - 3]], "gold": 0}
        for place, word in enumerate(words)
    ]
    picked: dict[str, list[int]] = {"mean": [], "sum": [], "characters": []}
    for prompt in task_of(rows, "multiple_choice").prompts():
        found = tokenize_candidates(reader(), prompt, 128)
        nats = torch.tensor([by_definition(loaded.model, candidate)[0] for candidate in found])
        sizes = {
            "mean": torch.tensor([len(candidate.targets) for candidate in found]),
            "sum": torch.ones(3),
            "characters": torch.tensor([len(text) for text in prompt.continuations]),
        }
        for name, size in sizes.items():
            picked[name].append(int((nats / size).argmin()))
    right = task_of([{**row, "gold": best} for row, best in zip(rows, picked["mean"], strict=True)], "multiple_choice")
    (score,) = score_tasks(loaded, [right])

    def agreement(name: str) -> float:
        return sum(a == b for a, b in zip(picked["mean"], picked[name], strict=True)) / len(words)

    assert score.accuracy == 1.0
    assert score.accuracy_sum == agreement("sum") < 1.0
    assert score.accuracy_per_character == agreement("characters") < 1.0
    assert score_tasks(loaded, [right], questions=2)[0].questions == 2


def _score_on_rank() -> list[TaskScore]:
    """Scores of two kinds of tasks, on this rank of those that share them."""
    model = LoadedModel(random_decoder(READER), None, reader(), Path("here"), 0)
    tasks = [task_of(CHOICES, "multiple_choice", 1), task_of(ANSWERS, "generation_task_with_answers")]
    return score_tasks(model, tasks, sharing=Sharing(dist.get_rank(), 2) if dist.is_initialized() else WHOLE)


def test_two_ranks_share_the_questions_and_both_get_the_scores_of_one() -> None:
    assert run_ranks(_score_on_rank, 2) == [_score_on_rank()] * 2


def test_generated_text_is_matched(loaded: LoadedModel) -> None:
    assert matches_answer("The  Cat_sat, there", ["cat sat"])
    assert not matches_answer("dog cat", ["cat"])
    assert not matches_answer("Cat", ["cat"], normalise=False)
    said = _continue(loaded, "Say yes.")
    rows = [{"context": "Say yes.", "answer": said}, {"context": "Say no.", "answer": "never"}]
    task = task_of(rows, "generation_task_with_answers", do_normalization=False)
    (score,) = score_tasks(loaded, [task])
    assert (score.accuracy, score.questions, score.perplexity) == (0.5, 2, None)


def _continue(loaded: LoadedModel, prompt: str) -> str:
    tokens = reader()
    ids = tokens.encode(prompt)
    for _ in range(3):
        ids.append(int(loaded.model.logits(torch.tensor([ids]))[0, -1].argmax()))
    text = tokens.decode(ids[len(tokens.encode(prompt)) :])
    # Tokens that are no character of their own would not come back from their text.
    assert tokens.encode(text) == ids[len(tokens.encode(prompt)) :]
    return text


def test_lists_of_tasks_are_read_as_foundry_writes_them(tmp_path: Path) -> None:
    (tmp_path / "eval/local").mkdir(parents=True)
    write(tmp_path / "eval/local/a.jsonl", [{**row, "category": c} for c in ("x", "y") for row in TEXTS])
    entry = "{label: a, dataset_uri: eval/local/a.jsonl, num_fewshot: [0, 1], icl_task_type: language_modeling"
    listing = tmp_path / "eval/tasks.yaml"
    listing.write_text(f"icl_tasks:\n- {entry}, has_categories: true}}\n")
    tasks = load_tasks([listing])
    assert [(task.name, task.shots, len(task.rows)) for task in tasks] == [
        ("a/x", 0, 2),
        ("a/y", 0, 2),
        ("a/x", 1, 2),
        ("a/y", 1, 2),
    ]
    listing.write_text(f"icl_tasks:\n- {entry}, colour: red}}\n")
    with pytest.raises(ConfigError, match="colour"):
        load_tasks([listing])
    alone = [write(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate([CHOICES, SCHEMA, TEXTS, ANSWERS])]
    kinds = ["multiple_choice", "schema", "language_modeling", "generation_task_with_answers"]
    assert [task.kind for task in load_tasks(alone, shots=2)] == kinds
    with pytest.raises(DataError, match="no task that can be scored"):
        load_tasks([write(tmp_path / "odd.jsonl", [{"text": "x"}])])
    with pytest.raises(ConfigError, match="No such file"):
        load_tasks([tmp_path / "absent.jsonl"])
