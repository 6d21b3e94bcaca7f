"""Text from a loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed_ranks import run_ranks
from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.generation import Continuation, Sampling, generate_text, generate_tokens
from phalanx.families.language.evaluation.load_weights import LoadedModel, load_for_inference
from small_models import READER, byte_tokenizer, random_decoder, save_run


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    save_run(tmp_path, random_decoder(READER))
    return load_for_inference(tmp_path, torch.device("cpu"))


def test_text_is_that_of_the_drawn_tokens(loaded: LoadedModel) -> None:
    shown: list[str] = []
    result = generate_text(
        loaded, "def f", max_tokens=40, sampling=Sampling(), seed=7, show=lambda index, piece: shown.append(piece)
    )
    (written,) = result.continuations
    prompt = byte_tokenizer().encode("def f").ids
    assert result.prompt_tokens == len(prompt)
    assert written.tokens == list(generate_tokens(loaded.model, prompt, max_tokens=40, seed=7, eod=0))
    assert "def f" + written.text == "".join(shown)
    assert len(shown) > 10, "text comes piece by piece"
    whole = byte_tokenizer().decode(prompt + written.tokens, skip_special_tokens=True)
    assert "def f" + written.text == whole


def test_each_continuation_has_a_seed_of_its_own(loaded: LoadedModel) -> None:
    three = generate_text(loaded, "def f", max_tokens=20, sampling=Sampling(), seed=5, count=3).continuations
    alone = generate_text(loaded, "def f", max_tokens=20, sampling=Sampling(), seed=6).continuations
    assert [c.seed for c in three] == [5, 6, 7]
    assert three[1] == alone[0]
    assert len({c.text for c in three}) == 3


def _write_share(folder: Path) -> list[Continuation]:
    loaded = load_for_inference(folder, torch.device("cpu"))
    return generate_text(
        loaded, "def f", max_tokens=20, sampling=Sampling(), seed=5, count=3, rank=dist.get_rank(), ranks=2
    ).continuations


def test_ranks_that_share_the_continuations_all_get_those_of_one(loaded: LoadedModel, tmp_path: Path) -> None:
    whole = generate_text(loaded, "def f", max_tokens=20, sampling=Sampling(), seed=5, count=3).continuations
    assert run_ranks(_write_share, 2, tmp_path) == [whole, whole]
    with pytest.raises(ConfigError, match="count=1 leaves some of 2 ranks nothing to write; start at most 1 ranks"):
        generate_text(loaded, "def f", max_tokens=20, sampling=Sampling(), seed=5, rank=0, ranks=2)


def test_the_default_length_leaves_room_for_the_prompt(loaded: LoadedModel) -> None:
    result = generate_text(loaded, "x" * 120, max_tokens=None, sampling=Sampling(0.0), seed=0)
    (written,) = result.continuations
    assert result.prompt_tokens + len(written.tokens) == loaded.model.config.max_positions
    assert not written.ended


def test_the_end_of_the_document_ends_the_text(loaded: LoadedModel) -> None:
    with torch.no_grad():
        loaded.model.embedding.weight[:, 0] = 0.0
        loaded.model.head.weight[0] = 10.0 * loaded.model.head.weight[1:].mean(0) + 1.0
    for seed in range(20):
        (written,) = generate_text(loaded, "def f", max_tokens=100, sampling=Sampling(), seed=seed).continuations
        assert 0 not in written.tokens
        assert written.ended == (len(written.tokens) < 100)
        if written.ended:
            break
    else:
        pytest.fail("no continuation ended, though the model likes token 0")


def test_what_cannot_be_generated(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="a prompt of 6 tokens and 200 more need 206 positions, but the model has 128"
    ):
        generate_text(loaded, "abc + ", max_tokens=200, sampling=Sampling(), seed=0)
    save_run(tmp_path / "other", random_decoder(READER), tokenizer=False)
    silent = load_for_inference(tmp_path / "other", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"step-00000010 came without a tokenizer; give one with --tokenizer"):
        generate_text(silent, "abc", max_tokens=5, sampling=Sampling(), seed=0)
