"""Optimizer state in host memory: the same bits, in buckets; what is refused; host memory that is given out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint import materialise_optimizer_state
from phalanx.config.schema import OWN_OPTIMIZERS, Optimizer
from phalanx.errors import ConfigError
from phalanx.host_memory import CHUNK_BYTES, HostMemory
from phalanx.nn.parameters import ParameterKind
from phalanx.optimizers import (
    OffloadedOptimizer,
    build_optimizer,
    choose_kind,
    find_optimizer,
    offloaded_state,
    set_learning_rate,
)

PER_PARAMETER = [name for name in OWN_OPTIMIZERS if find_optimizer(Optimizer(name=name, lr=1.0)).per_parameter]
SHAPES = ((8, 64), (7,), (32, 64), (3, 5), (16, 16))


def kind_of(name: str) -> ParameterKind:
    """The kind of each parameter: all are matrices."""
    return "matrix"


def train(name: str, *, offloaded: bool, steps: int = 4) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Parameters and their state after some updates, one of which is skipped, and one without a parameter's gradient."""
    config = Optimizer(name=name, lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    parameters = {f"p{n}": nn.Parameter(torch.randn(shape, generator=generator)) for n, shape in enumerate(SHAPES)}
    kind = choose_kind(config, offloaded=offloaded)
    optimizer = build_optimizer(parameters, config, kind_of, kind=kind)
    for step in range(steps):
        set_learning_rate(optimizer, 1e-2 / (step + 1))
        for number, parameter in enumerate(parameters.values()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (step, number) == (2, 1) else gradient
        kind.update(optimizer, torch.tensor(2.0), torch.tensor(float(step == 1)))
        optimizer.zero_grad(set_to_none=True)
    state = [value for p in parameters.values() for value in optimizer.state[p].values()]
    return [*(p.detach() for p in parameters.values()), *state], optimizer


@pytest.mark.parametrize("bucket", [1, 4000, 1 << 27])
@pytest.mark.parametrize("name", PER_PARAMETER)
def test_state_in_host_memory_gives_the_same_bits(name: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_state, "BUCKET_BYTES", bucket)
    found, optimizer = train(name, offloaded=True)
    wanted, _ = train(name, offloaded=False)
    assert isinstance(optimizer, OffloadedOptimizer)
    assert len(found) == len(wanted) > len(SHAPES)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_state_has_one_place_in_host_memory_from_the_first_update_on() -> None:
    _, optimizer = train("adamw", offloaded=True, steps=1)
    assert isinstance(optimizer, OffloadedOptimizer)
    places = [value.data_ptr() for state in optimizer.state.values() for value in state.values() if value.dim()]
    for parameter in optimizer.state:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [v.data_ptr() for state in optimizer.state.values() for v in state.values() if v.dim()] == places
    storages = {v.untyped_storage().data_ptr() for state in optimizer.state.values() for v in state.values() if v.dim()}
    assert len(storages) == 1, "a chunk of host memory holds all of it"


def test_state_is_made_before_the_first_update_as_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_state, "BUCKET_BYTES", 1)
    parameter = nn.Parameter(torch.ones(4, 4))
    config = Optimizer(lr=1e-2)
    optimizer = build_optimizer({"p": parameter}, config, kind_of, kind=choose_kind(config, offloaded=True))
    materialise_optimizer_state(optimizer)
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(parameter, torch.ones(4, 4)) and not optimizer.state[parameter]["exp_avg"].any()


def test_an_optimizer_that_works_on_many_parameters_together_is_refused() -> None:
    config = Optimizer(name="muon", lr=1e-2)
    with pytest.raises(ConfigError, match=r"offload_optimizer=true: optimizer.name=muon .* take adamw"):
        build_optimizer(
            {"p": nn.Parameter(torch.ones(2, 2))}, config, kind_of, kind=choose_kind(config, offloaded=True)
        )


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (0, 4)])
def test_host_memory_has_the_shape_and_strides_asked_for(shape: tuple[int, ...]) -> None:
    memory = HostMemory(torch.device("cpu"))
    for dtype in (torch.uint8, torch.float64):
        like: Any = torch.ones(shape, dtype=dtype).t() if len(shape) == 2 else torch.ones(shape, dtype=dtype)
        found = memory.allocate_like(like)
        assert (found.shape, found.stride(), found.dtype) == (like.shape, like.stride(), dtype)
        assert torch.equal(found.copy_(like), like)


def test_what_is_larger_than_a_chunk_has_one_of_its_own() -> None:
    memory = HostMemory(torch.device("cpu"))
    large = memory.allocate_like(torch.empty(CHUNK_BYTES + 64, dtype=torch.uint8))
    assert large.untyped_storage().nbytes() == CHUNK_BYTES + 64
    small = [memory.allocate_like(torch.empty(10)) for _ in range(2)]
    small[0].fill_(1.0)
    small[1].fill_(2.0)
    assert small[0].eq(1.0).all() and small[1].untyped_storage().data_ptr() == small[0].untyped_storage().data_ptr()
