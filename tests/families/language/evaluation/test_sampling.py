"""Drawing tokens: the distribution, the limits, the seed, and the same tokens with caches as without."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.language.evaluation.generation import Sampling, draw_token, generate_batch, generate_tokens
from small_models import FAMILIES, GPT, LLAMA, random_decoder

PROMPT = [5, 17, 3, 88]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_most_likely_ones_of_the_uncached_model(family: str) -> None:
    decoder = random_decoder(FAMILIES[family])
    tokens = list(generate_tokens(decoder, PROMPT, max_tokens=20, temperature=0.0))
    expected: list[int] = []
    for _ in range(20):
        logits = decoder.logits(torch.tensor([PROMPT + expected]))
        expected.append(int(logits[0, -1].argmax()))
    assert tokens == expected


def test_no_kernel_that_plans_for_each_number_of_keys_and_the_choice_ends_between_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, plans = random_decoder(LLAMA), []
    logits = decoder.logits

    def watched(*arguments: object, **options: object) -> torch.Tensor:
        plans.append(torch.backends.cuda.cudnn_sdp_enabled())
        found: torch.Tensor = logits(*arguments, **options)  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(decoder, "logits", watched)
    steps = generate_tokens(decoder, PROMPT, max_tokens=3, seed=1)
    for _ in range(2):
        next(steps)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert len(list(steps)) == 1 and plans == [False] * 3


def test_the_seed_decides_the_tokens() -> None:
    decoder = random_decoder(LLAMA)
    first = list(generate_tokens(decoder, PROMPT, max_tokens=20, seed=1))
    assert first == list(generate_tokens(decoder, PROMPT, max_tokens=20, seed=1))
    assert first != list(generate_tokens(decoder, PROMPT, max_tokens=20, seed=2))


def test_a_batch_draws_what_each_seed_draws_alone() -> None:
    decoder = random_decoder(LLAMA)
    steps = list(generate_batch(decoder, PROMPT, max_tokens=20, sampling=Sampling(), seeds=[7, 8, 9]))
    for row, seed in enumerate([7, 8, 9]):
        alone = list(generate_tokens(decoder, PROMPT, max_tokens=20, seed=seed))
        assert [step[row] for step in steps] == alone


def test_generation_stops_at_the_end_of_the_document() -> None:
    decoder = random_decoder(LLAMA)
    tokens = list(generate_tokens(decoder, PROMPT, max_tokens=20, seed=1))
    end = tokens[6]
    first = tokens.index(end)
    assert list(generate_tokens(decoder, PROMPT, max_tokens=20, seed=1, eod=end)) == tokens[:first]
    steps = list(generate_batch(decoder, PROMPT, max_tokens=20, sampling=Sampling(), seeds=[1, 2], ends={end}))
    assert [step[0] for step in steps] == tokens[:first] + [None] * (len(steps) - first)


def draws(sampling: Sampling, logits: list[float], count: int = 20_000) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    tokens = [draw_token(torch.tensor(logits), sampling, generator) for _ in range(count)]
    return [tokens.count(token) / count for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = [0.1, 2.0, -1.0, 1.3]
    expected = torch.softmax(torch.tensor(logits) / temperature, dim=0).tolist()
    # Four standard deviations of a share are at most 4 * sqrt(0.25 / 20000) = 0.014
    assert draws(Sampling(temperature), logits) == pytest.approx(expected, abs=0.014)


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert draws(Sampling(top_k=2), logits, 2000) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.045)
    assert draws(Sampling(top_p=0.65), logits, 2000) == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.045)
    assert draws(Sampling(top_p=0.75), logits, 2000) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0], abs=0.045)
    # top-p counts what top-k left: of 4/7 and 3/7 the first alone reaches one half
    assert draws(Sampling(top_k=2, top_p=0.5), logits, 100) == [1, 0, 0, 0]
    assert draws(Sampling(top_p=1e-9), logits, 100) == [1, 0, 0, 0]
    assert draws(Sampling(temperature=0.0), logits, 10) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature=nan must be a finite number of at least 0"),
        ({"top_k": 0}, "top-k=0 must be at least 1; leave it out to draw from all tokens"),
        ({"top_p": 1.5}, "top-p=1.5 must be above 0 and at most 1; leave it out to draw from all tokens"),
        (
            {"max_tokens": 61},
            "a prompt of 4 tokens and 61 more need 65 positions, but the model has 64; ask for at most 60",
        ),
    ],
)
def test_impossible_options_are_refused_before_the_first_token(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        generate_tokens(random_decoder(GPT), PROMPT, **{"max_tokens": 5, **options})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty and there is no token that begins a document; give some text"),
        ([97], "the prompt holds token 97, but the model has 97: the tokenizer is not the model's"),
        (
            [1] * 64,
            "a prompt of 64 tokens and 5 more need 69 positions, but the model has 64; "
            "shorten the prompt to under 64 tokens",
        ),
    ],
)
def test_impossible_prompts_are_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        generate_tokens(random_decoder(GPT), prompt, max_tokens=5)
    assert str(raised.value) == message


def test_all_positions_can_be_used() -> None:
    assert len(list(generate_tokens(random_decoder(GPT), PROMPT, max_tokens=60))) == 60


def test_damaged_weights_are_reported() -> None:
    decoder = random_decoder(LLAMA)
    with torch.no_grad():
        decoder.blocks[1].mlp.down.weight[0, 0] = float("nan")
    with pytest.raises(PhalanxError, match="logits are not finite"):
        list(generate_tokens(decoder, PROMPT, max_tokens=5))
