"""Hashes of bits, and what two disagreements of replicas tell of their cause."""

import pytest
import torch

from phalanx.training.safeguards import replicas
from phalanx.training.safeguards.replicas import Disagreement, hash_bits, same_bits
from phalanx.training.safeguards.wrong_numbers import classify_repeated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_any_flipped_bit_changes_the_hash(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK", 8)
    x = torch.arange(21).to(dtype)
    whole = hash_bits(x)
    changed = x.clone()
    data = changed.view(torch.uint8)
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert hash_bits(changed) != whole, (place, bit)
            data[place] ^= 1 << bit
    assert hash_bits(changed) == whole


def test_bits_count_and_not_values() -> None:
    assert hash_bits(torch.tensor([0.0])) != hash_bits(torch.tensor([-0.0]))
    assert hash_bits(torch.full((3,), torch.nan)) == hash_bits(torch.full((3,), torch.nan))
    assert hash_bits(torch.tensor([1.0, 2.0])) != hash_bits(torch.tensor([2.0, 1.0]))
    assert hash_bits(torch.ones(4, 6).t()) == hash_bits(torch.ones(24))
    assert hash_bits(torch.ones(0)) == 0


def test_bits_are_compared() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([1.0 + 2**-23, torch.nan]))
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


def disagree(**ranks: int) -> Disagreement:
    hashes = {int(name[1:]): {"weight": value} for name, value in ranks.items()}
    groups = frozenset({("weight", tuple(hashes))})
    return Disagreement(8, groups, hashes, {rank: f"host-{rank}" for rank in hashes})


def test_the_majority_tells_which_rank_is_wrong() -> None:
    assert disagree(r0=1, r1=1, r2=5, r3=1).suspects() == (2,)
    assert disagree(r0=1, r1=2).suspects() == (0, 1)
    assert disagree(r0=1, r1=2).wrong_against({0: {"weight": 1}, 1: {"weight": 1}}) == (1,)


def test_parts_that_other_ranks_hold_otherwise_do_not_vote() -> None:
    # Two tensor-parallel parts, each held by two replicas.
    hashes = {rank: {"weight": value} for rank, value in enumerate((1, 2, 1, 3, 1, 2))}
    found = Disagreement(8, frozenset({("weight", (1, 3, 5))}), hashes, dict.fromkeys(hashes, "host"))
    assert found.suspects() == (3,) and found.ranks == {1, 3, 5}


def test_steps_done_again_tell_a_device_from_software() -> None:
    again = classify_repeated(disagree(r0=1, r1=2), disagree(r0=1, r1=3))
    assert "persistent fault of rank 1 (host-1)" in again
    assert "persistent fault of rank 2" in classify_repeated(disagree(r0=1, r1=1, r2=5), disagree(r0=4, r1=4, r2=6))
    assert "more likely software" in classify_repeated(disagree(r0=1, r1=2), disagree(r0=1, r1=2))
    assert "more likely software" in classify_repeated(disagree(r0=1, r1=2), disagree(r0=3, r1=4))
