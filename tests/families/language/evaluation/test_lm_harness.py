"""The model that lm-evaluation-harness asks: its answers against their definition, through the harness's own requests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance

from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.generation import generate_tokens
from phalanx.families.language.evaluation.lm_harness import PhalanxLM
from phalanx.families.language.evaluation.load_weights import LoadedModel
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.families.language.huggingface.folder_files import SpecialTokens
from small_models import READER, byte_tokenizer, random_decoder

TOKENS = TextTokenizer(byte_tokenizer(), SpecialTokens(end=(0,)))
MODEL = random_decoder(READER)
LM = PhalanxLM(LoadedModel(MODEL, None, TOKENS, Path("here"), 0))


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
