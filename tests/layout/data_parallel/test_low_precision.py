import pytest
import torch

from phalanx.config.model import LanguageModel
from phalanx.families.language.decoder import Decoder
from phalanx.layout.data_parallel.low_precision import LowPrecisionParameters

SHAPE = LanguageModel(n_layers=2, d_model=32, n_heads=4, d_ff=64, vocab_size=61, max_positions=16, tied_head=True)


def decoder(parameter_dtype: torch.dtype) -> Decoder:
    return Decoder(SHAPE, dtype=torch.bfloat16).to(parameter_dtype)


def filled_masters() -> Decoder:
    masters = decoder(torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return masters


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def test_the_copy_computes_what_casting_layers_compute() -> None:
    masters, working = filled_masters(), decoder(torch.bfloat16)
    LowPrecisionParameters(masters, working).refresh()
    with torch.no_grad():
        assert torch.equal(working(*batch(0)).total, masters(*batch(0)).total)


def test_gradients_are_summed_in_float32_over_micro_batches() -> None:
    masters, working = filled_masters(), decoder(torch.bfloat16)
    LowPrecisionParameters(masters, working).refresh()
    single = []
    for seed in (0, 1, 2):
        working(*batch(seed)).total.backward()
        single.append({name: p.grad for name, p in masters.named_parameters()})
        for parameter in masters.parameters():
            parameter.grad = None
    for seed in (0, 1, 2):
        working(*batch(seed)).total.backward()
    for name, parameter in masters.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        expected = sum(part[name] for part in single)
        assert torch.equal(parameter.grad, expected), name
        # What bfloat16 sums would lose is there: not every value is one that bfloat16 holds.
        assert not torch.equal(parameter.grad, parameter.grad.bfloat16().float()) or parameter.numel() < 64, name
    assert all(parameter.grad is None for parameter in working.parameters())


def test_gradients_equal_those_of_casting_layers_within_bfloat16() -> None:
    masters, working = filled_masters(), decoder(torch.bfloat16)
    LowPrecisionParameters(masters, working).refresh()
    working(*batch(0)).total.backward()
    copied = {name: p.grad for name, p in masters.named_parameters()}
    casting = filled_masters()
    casting(*batch(0)).total.backward()
    for name, parameter in casting.named_parameters():
        assert parameter.grad is not None
        error = (copied[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-2, (name, error)


def test_refreshing_rounds_the_present_masters() -> None:
    masters, working = filled_masters(), decoder(torch.bfloat16)
    copy = LowPrecisionParameters(masters, working)
    copy.refresh()
    with torch.no_grad():
        masters.blocks[1].mlp.down.weight.add_(1.0)
    copy.refresh()
    for a, b in zip(masters.parameters(), working.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)


def test_modules_of_different_shape_are_no_pair() -> None:
    other = Decoder(SHAPE.model_copy(update={"tied_head": False}), dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        LowPrecisionParameters(filled_masters(), other)


def test_what_is_written_already_is_left_alone() -> None:
    masters, working = filled_masters(), decoder(torch.bfloat16)
    copy = LowPrecisionParameters(masters, working)
    copy.refresh()
    assert copy.of_main[masters.blocks[0].mlp.down.weight] is working.blocks[0].mlp.down.weight
    before = {name: parameter.detach().clone() for name, parameter in working.named_parameters()}
    written = working.blocks[1].mlp.down.weight
    with torch.no_grad():
        for parameter in masters.parameters():
            parameter.add_(1.0)
    copy.refresh([written])
    for name, parameter in working.named_parameters():
        assert torch.equal(parameter, before[name]) == (parameter is written), name


def test_large_gradients_are_summed_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for large in (1 << 20, 1):
        monkeypatch.setattr("phalanx.kernels.parts_sum.LARGE", large)
        masters, working = filled_masters(), decoder(torch.bfloat16)
        LowPrecisionParameters(masters, working).refresh()
        for seed in (0, 1, 2):
            working(*batch(seed)).total.backward()
        sums.append([parameter.grad for parameter in masters.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True) if a is not None and b is not None)
    assert len(sums[0]) == len(sums[1]) and all(grad is not None for some in sums for grad in some)
