"""The chunked output head and loss against torch's own cross-entropy over all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.config.layers import NormConfig
from phalanx.nn.cross_entropy import IGNORED, linear_cross_entropy
from phalanx.nn.vocabulary import OutputHead

N, D, V = 23, 8, 31


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,), generator=generator)
    targets[[0, 7, N - 1]] = IGNORED
    return hidden, weight, targets


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, z_loss: float, softcap: float | None = None
) -> torch.Tensor:
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept = targets != IGNORED
    z = torch.logsumexp(logits, dim=-1)[kept]
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") + z_loss * z.square().sum()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 22, 23, 100])
def test_loss_and_gradients_equal_those_of_all_logits_at_once(
    chunk_tokens: int, z_loss: float, softcap: float | None
) -> None:
    hidden, weight, targets = inputs()
    result = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, z_loss=z_loss, softcap=softcap)
    # A scale other than one shows whether the backward pass passes the incoming gradient on.
    (3.0 * result.total).backward()
    ours = result.total, hidden.grad, weight.grad

    hidden, weight, targets = inputs()
    expected = reference(hidden, weight, targets, z_loss, softcap)
    (3.0 * expected).backward()
    torch.testing.assert_close(ours, (expected, hidden.grad, weight.grad), rtol=1e-12, atol=1e-12)
    assert result.count.item() == N - 3


def test_gradients_are_the_same_when_they_are_asked_for_again() -> None:
    hidden, weight, targets = inputs()
    total = 3.0 * linear_cross_entropy(hidden, weight, targets, chunk_tokens=5).total
    # As a pipeline does that forms gradients of inputs first, and of weights later.
    (of_hidden,) = torch.autograd.grad(total, hidden, retain_graph=True)
    both = torch.autograd.grad(total, (hidden, weight))
    wanted = torch.autograd.grad(3.0 * reference(hidden, weight, targets, 0.0), (hidden, weight))
    torch.testing.assert_close((of_hidden, *both), (wanted[0], *wanted), rtol=1e-12, atol=1e-12)


def test_all_targets_ignored_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets = inputs()
    result = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED), chunk_tokens=4, z_loss=0.1)
    result.total.backward()
    assert result.total.item() == 0.0
    assert result.count.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        result = linear_cross_entropy(hidden, weight, targets, chunk_tokens=5)
    torch.testing.assert_close(result.total, reference(hidden, weight, targets, 0.0).detach(), rtol=1e-12, atol=0)
    assert not result.total.requires_grad


def test_bfloat16_activations_with_a_float32_weight_sum_in_float32() -> None:
    hidden, weight, targets = inputs(torch.float32)
    low = hidden.detach().bfloat16().requires_grad_()
    result = linear_cross_entropy(low, weight, targets, chunk_tokens=6)
    result.total.backward()
    assert result.total.dtype == torch.float32
    assert low.grad is not None and low.grad.dtype == torch.bfloat16
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    expected = reference(low.detach().float(), weight.detach().bfloat16().float(), targets, 0.0)
    torch.testing.assert_close(result.total.detach(), expected, rtol=1e-2, atol=0)


class _Formats(TorchDispatchMode):
    """Notes the formats of all results of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape:
            self.found.add(result.dtype)
        return result


def test_the_backward_pass_forms_no_second_wide_gradient_of_a_narrow_table() -> None:
    hidden, weight, targets = (x if x.dtype == torch.int64 else x.detach().bfloat16() for x in inputs(torch.float32))
    weight.requires_grad_()
    wide = weight.detach().float().requires_grad_()
    wanted = torch.autograd.grad(0.3 * linear_cross_entropy(hidden, wide, targets, chunk_tokens=5).total, wide)[0]
    total = 0.3 * linear_cross_entropy(hidden, weight, targets, chunk_tokens=5).total
    with _Formats(weight.shape) as formats:
        total.backward()
    assert weight.grad is not None and torch.equal(weight.grad, wanted.bfloat16())
    assert formats.found == {torch.bfloat16}


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scores_of_each_target_are_those_of_its_logits(softcap: float | None) -> None:
    hidden, weight, targets = inputs()
    norm = NormConfig(width=D, kind="rmsnorm", eps=1e-6, bias=False)
    head = OutputHead(V, norm, chunk_tokens=4, z_loss=0.0, owns_weight=False, softcap=softcap).double()
    torch.nn.init.ones_(head.norm.weight)
    nats, likeliest = head(hidden[None], targets[None], weight, apart=True)
    logits = head.logits(hidden[None], weight)[0].detach()
    kept = targets != IGNORED
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(nats[0], expected)
    assert likeliest[0][kept].tolist() == logits.argmax(-1)[kept].tolist()
    assert not likeliest[0][~kept].any()
