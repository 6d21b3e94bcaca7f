"""Initial values: the same numbers in every format, chunk and placement."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed_ranks import run_ranks
from phalanx.counter_random import normal_values, stream_key
from phalanx.errors import PhalanxError
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.decoder import Decoder
from phalanx.layout import initial_values
from phalanx.layout.initial_values import fill_initial, initialise_parameters
from phalanx.nn.parameters import InitRule, InitRules
from phalanx.torch_compat.common import full_name
from small_models import GPT, LLAMA

NORMAL = InitRule.normal(0.02)
RULES: InitRules = [("*bias", InitRule.constant(0.5)), ("*", NORMAL)]


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    tensor = torch.full(shape, math.nan, dtype=dtype)
    fill_initial(tensor, "weight", NORMAL, seed)
    return tensor


# --- one device --------------------------------------------------------------------------------------------------------


def test_element_i_is_value_i_of_the_stream_of_seed_and_name() -> None:
    values = normal_values(stream_key("initial values", 3, "weight"), torch.arange(35)) * 0.02
    assert torch.equal(filled((5, 7)), values.float().view(5, 7))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_change_no_value(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled((9, 13))
    monkeypatch.setattr(initial_values, "_CHUNK_CPU", chunk)
    assert torch.equal(filled((9, 13)), whole)


def test_a_parameter_of_several_chunks_is_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_values, "_CHUNK_CPU", 2**12)
    values = normal_values(stream_key("initial values", 3, "weight"), torch.arange(300 * 101)) * 0.02
    assert torch.equal(filled((300, 101)), values.float().view(300, 101))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_format_holds_the_float32_values(dtype: torch.dtype) -> None:
    assert torch.equal(filled((9, 13), dtype), filled((9, 13)).to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (2, 3, 4)])
def test_any_number_of_dims(shape: tuple[int, ...]) -> None:
    assert torch.equal(filled(shape).view(-1), filled((24,))[: math.prod(shape)])


def test_seed_and_name_each_change_the_values() -> None:
    other_name = torch.empty(9, 13)
    fill_initial(other_name, "other", NORMAL, 3)
    assert not torch.equal(filled((9, 13)), filled((9, 13), seed=4))
    assert not torch.equal(filled((9, 13)), other_name)


@pytest.mark.parametrize("family", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_decoder_is_filled_as_declared(family: Any) -> None:
    decoder = Decoder(family.model_copy(update={"d_model": 240, "n_layers": 3}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(math.nan)
    initialise_parameters(dict(decoder.named_parameters()), DeclaredLanguage(decoder.config, 1).initial_rules(), 0)
    for name, parameter in decoder.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name
            continue
        writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(6) if writes_residual else 0.02
        error = 4 / math.sqrt(2 * parameter.numel())
        assert float(parameter.detach().std()) == pytest.approx(std, rel=error), name


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight


def test_a_shared_parameter_is_filled_once_under_its_first_name() -> None:
    tied = Tied()
    initialise_parameters(dict(tied.named_parameters()), RULES, 3)
    expected = torch.empty(6, 6)
    fill_initial(expected, "first.weight", NORMAL, 3)
    assert tied.second.weight is tied.first.weight
    assert torch.equal(tied.first.weight, expected)


def test_a_parameter_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(PhalanxError, match=r"no initial value is declared for parameter 1\.bias; add a rule"):
        layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
        initialise_parameters(dict(layers.named_parameters()), [("*weight", NORMAL)], 0)


def test_the_first_rule_that_matches_counts() -> None:
    layer = nn.Linear(4, 4)
    initialise_parameters(
        dict(layer.named_parameters()), [("w*", InitRule.constant(2.0)), ("*", InitRule.constant(3.0))], 0
    )
    assert layer.weight.unique().tolist() == [2.0]
    assert layer.bias.unique().tolist() == [3.0]


def test_compiled_modules_start_from_the_same_values() -> None:
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    initialise_parameters(dict(plain.named_parameters()), RULES, 3)
    inner = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    inner[0] = torch.compile(inner[0])
    compiled = torch.compile(inner)
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    initialise_parameters({full_name(name): p for name, p in compiled.named_parameters()}, RULES, 3)
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a, b)


# --- several ranks -----------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16)

SHAPES = [(8, 8), (7, 5), (3, 9), (2, 3), (1, 1), (13,), (2,), (6, 5, 4)]
"""Even, uneven, and with fewer rows than ranks."""


def placements_of(dims: int) -> list[tuple[Placement, ...]]:
    """All placements of a tensor on two axes."""
    single: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(dims))]
    return [(first, second) for first in single for second in single]


def placed_shards_differ() -> list[str]:
    """On this rank: shards of DTensors that differ from the same shard of the one-device tensor."""
    two_axes = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    one_axis = init_device_mesh("cpu", (6,))
    wrong = []
    for shape in SHAPES:
        for mesh, placements in [
            *((two_axes, placements) for placements in placements_of(len(shape))),
            *((one_axis, placements[:1]) for placements in placements_of(len(shape))[:: len(shape) + 1]),
        ]:
            for dtype in DTYPES:
                tensor = empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
                fill_initial(tensor, "weight", NORMAL, 3)
                expected = distribute_tensor(filled(shape, dtype), mesh, placements, src_data_rank=None)
                same = torch.equal(tensor.to_local(), expected.to_local())
                if not same or not torch.equal(tensor.full_tensor(), filled(shape, dtype)):
                    wrong.append(f"{shape} {placements} on {tuple(mesh.shape)} {dtype}")
    return wrong


class Pair(nn.Module):
    """Two matrices as tensor parallelism splits them: `up` by rows, `down` by columns; and a vector it leaves alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.Parameter(torch.empty(width))


PARALLEL_SIZES = [(12, 6), (5, 7), (4, 8), (3, 2), (9, 9), (2, 1)]
"""7 rows go to 4 and 3, and these to 2, 2, 0 and 1, 1, 1: an uneven split of which PyTorch loses track."""


def parallel_shards_differ() -> list[str]:
    """On this rank: shards of a module under tensor parallelism and FSDP2, filled after or before splitting."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    wrong = []
    for width, hidden in PARALLEL_SIZES:
        even = width % 6 == hidden % 6 == 0
        for dtype in DTYPES:
            before = Pair(width, hidden).to(dtype)
            initialise_parameters(dict(before.named_parameters()), [("*", NORMAL)], 3)
            whole = {name: parameter.detach().clone() for name, parameter in before.named_parameters()}
            split(before, mesh)
            with torch.device("meta"):
                after = Pair(width, hidden).to(dtype)
            split(after, mesh)
            after.to_empty(device="cpu")
            initialise_parameters(dict(after.named_parameters()), [("*", NORMAL)], 3)
            for (name, parameter), expected in zip(after.named_parameters(), before.parameters(), strict=True):
                assert isinstance(parameter, DTensor) and isinstance(expected, DTensor)
                same = torch.equal(parameter.to_local(), expected.to_local())
                # PyTorch gathers parameters that are split twice along one dim only where both splits are even.
                if not same or (even and not torch.equal(parameter.full_tensor(), whole[name])):
                    wrong.append(f"{name} of {width} x {hidden} {parameter.placements} {dtype}")
    return wrong


def split(pair: Pair, mesh: DeviceMesh) -> None:
    """Tensor parallelism inside, FSDP2 outside: `up` is then split twice along its rows."""
    parallelize_module(pair, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)
    fully_shard(pair, mesh=mesh["dp"])


def decoder_differs() -> list[str]:
    """On this rank: parameters of a sharded decoder that differ from those of one device."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    with torch.device("meta"):
        sharded = Decoder(LLAMA)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded.to_empty(device="cpu")
    initialise_parameters(dict(sharded.named_parameters()), DeclaredLanguage(LLAMA, 1).initial_rules(), 3)
    whole = Decoder(LLAMA)
    initialise_parameters(dict(whole.named_parameters()), DeclaredLanguage(LLAMA, 1).initial_rules(), 3)
    expected = dict(whole.named_parameters())
    parts = {name: parameter for name, parameter in sharded.named_parameters() if isinstance(parameter, DTensor)}
    assert parts.keys() == expected.keys()
    return [name for name, part in parts.items() if not torch.equal(part.full_tensor(), expected[name])]


CHECKS: dict[str, Callable[[], list[str]]] = {
    "placed": placed_shards_differ,
    "tensor parallel in FSDP2": parallel_shards_differ,
    "decoder": decoder_differs,
}


def all_checks() -> dict[str, list[str]]:
    """What each check finds on this rank."""
    return {name: check() for name, check in CHECKS.items()}


@pytest.fixture(scope="module")
def found_on_ranks() -> list[dict[str, list[str]]]:
    return run_ranks(all_checks, 6)


@pytest.mark.parametrize("check", CHECKS)
def test_every_shard_holds_the_values_of_one_device(check: str, found_on_ranks: list[dict[str, list[str]]]) -> None:
    for rank, found in enumerate(found_on_ranks):
        assert found[check] == [], f"rank {rank}"
