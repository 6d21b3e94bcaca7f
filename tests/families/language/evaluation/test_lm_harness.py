"""The model that lm-evaluation-harness asks: its answers against their definition, through the harness's own requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance

from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.generation import generate_tokens
from phalanx.families.language.evaluation.held_out import Sharing
from phalanx.families.language.evaluation.lm_harness import PhalanxLM, score_harness_tasks
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.families.language.huggingface.folder_files import SpecialTokens
from small_models import READER, byte_tokenizer, random_decoder

TOKENS = TextTokenizer(byte_tokenizer(), SpecialTokens(end=(0,)))
MODEL = random_decoder(READER)
LM_LOADED = LoadedModel(MODEL, None, TOKENS, Path("here"), 0)
LM = PhalanxLM(LM_LOADED)


def ask(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def log_probability(ids: list[int], targets: int) -> float:
    logits = MODEL.logits(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    chosen = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return float(chosen[-targets:].sum())


def test_continuations_get_their_log_probability() -> None:
    context, more = TOKENS.encode("the licence:"), TOKENS.encode(" you may")
    likeliest = next(generate_tokens(MODEL, context, max_tokens=1, temperature=0.0))
    (value, greedy), (empty, _) = LM.loglikelihood(
        [ask("loglikelihood", "the licence:", " you may"), ask("loglikelihood", "", " you may")], disable_tqdm=True
    )
    assert value == pytest.approx(log_probability([*context, *more], len(more)), rel=1e-6)
    assert empty == pytest.approx(log_probability([0, *more], len(more)), rel=1e-6)
    assert not greedy
    ((_, greedy),) = LM._loglikelihood_tokens([(("", ""), context, [likeliest])])
    assert greedy


def test_long_texts_are_scored_once_in_windows() -> None:
    text = "all of it " * 60
    ids = TOKENS.encode(text)
    assert len(ids) > READER.max_positions
    whole = [0, *ids]
    size = READER.max_positions
    expected = log_probability(whole[: size + 1], size)
    for start in range(size, len(ids), size):
        end = min(start + size, len(ids))
        first = max(0, end - size)
        expected += log_probability(whole[first : end + 1], end - start)
    assert LM.loglikelihood_rolling([ask("loglikelihood_rolling", text)]) == [pytest.approx(expected, rel=1e-6)]


def test_text_ends_before_its_stop() -> None:
    prompt = TOKENS.encode("Copyright")
    text = TOKENS.decode(list(generate_tokens(MODEL, prompt, max_tokens=12, temperature=0.0, eod=0)))
    settings = {"until": [], "max_gen_toks": 12, "do_sample": False}
    assert LM.generate_until([ask("generate_until", "Copyright", settings)]) == [text]
    stop = text[3:5]
    stopped = LM.generate_until([ask("generate_until", "Copyright", {**settings, "until": [stop]})])
    assert stopped == [text.split(stop)[0]]
    with pytest.raises(ConfigError, match="do_sample"):
        LM.generate_until([ask("generate_until", "a", {"do_sample": True})])


def test_several_ranks_give_every_answer_that_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        ask("generate_until", prompt, {"until": [stop], "max_gen_toks": 9})
        for prompt, stop in (("Copyright", "a"), ("the licence:", "zz"), ("all of it", "a"))
    ]
    alone = LM.generate_until(requests)
    shares = []
    for rank in range(2):
        # What the other rank adds is left out, so each gives its own share.
        monkeypatch.setattr("phalanx.families.language.evaluation.in_context._add_over_ranks", lambda sums, *_: sums)
        shares.append(PhalanxLM(LM_LOADED, Sharing(rank, 2)).generate_until(requests))
    assert all(one == "" or other == "" for one, other in zip(*shares, strict=True))
    assert [one + other for one, other in zip(*shares, strict=True)] == alone


def test_tasks_of_a_folder_are_scored_as_the_harness_says(tmp_path: Path) -> None:
    rows = [
        {"text": "the licence:", "choices": ["you may", "you must"], "gold": 0},
        {"text": "all of it", "choices": ["is here", "was gone", "or none"], "gold": 2},
        {"text": "Copyright", "choices": ["holders", "notice"], "gold": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task = {
        "task": "own_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    right = 0
    for row in rows:
        sums = []
        for choice in row["choices"]:
            targets = TOKENS.encode(f" {choice}")
            sums.append(log_probability([*TOKENS.encode(str(row["text"])), *targets], len(targets)))
        right += max(range(len(sums)), key=sums.__getitem__) == row["gold"]
    (score,) = score_harness_tasks(LM_LOADED, ["own_choices"], folder=tmp_path)
    assert (score.task, score.metric, score.questions) == ("own_choices", "acc", 3)
    assert score.value == pytest.approx(right / 3)


def test_data_that_are_not_there_are_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone.jsonl"
    kwargs = {"data_files": {"test": str(gone)}}
    task = {"task": "own", "dataset_path": "json", "dataset_kwargs": kwargs, "output_type": "multiple_choice"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    with pytest.raises(ConfigError, match=r"--harness own: .*gone\.jsonl.*--harness-tasks"):
        score_harness_tasks(LM_LOADED, ["own"], folder=tmp_path)
