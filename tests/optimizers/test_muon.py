"""Muon: near-orthogonal updates of each matrix by itself, as Moonlight scales and decays them; AdamW for all else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from layout_cases import run_of
from phalanx.config.schema import Optimizer
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.families.weather.declare import DeclaredWeather
from phalanx.layout.data_parallel.gradients import local_gradient_norm
from phalanx.nn.declared_layers import gate_block
from phalanx.nn.experts import ExpertNetworks
from phalanx.nn.parameters import MatrixRows, ParameterKind
from phalanx.optimizers import HeldParameters, WholeMatrices, build_optimizer, set_learning_rate
from phalanx.optimizers.muon import COEFFICIENTS, MUON, Muon, orthogonalise
from phalanx.training.step import clip_or_skip
from small_forecasters import small


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def config(**fields: object) -> Optimizer:
    return Optimizer.model_validate({"name": "muon", "lr": 0.02, "weight_decay": 0.1, **fields})


def optimizer_over(
    parameters: dict[str, nn.Parameter],
    rows: dict[str, MatrixRows],
    dtype: torch.dtype = torch.float64,
    **fields: object,
) -> Muon:
    """Muon whose matrices are those that `rows` names; what it does not name is a norm, which does not decay."""
    matrices = WholeMatrices({parameters[name]: one for name, one in rows.items()}, dtype)

    def kind(name: str) -> ParameterKind:
        return "matrix" if name in rows else "norm"

    made = build_optimizer(parameters, config(**fields), kind, HeldParameters(matrices=matrices))
    assert isinstance(made, Muon)
    return made


def update(optimizer: Muon, divisor: float = 1.0, skip: float = 0.0) -> None:
    MUON.update(optimizer, torch.tensor(divisor), torch.tensor(skip))


# --- orthogonalisation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 160), (160, 64), (96, 48), (16, 512)])
def test_singular_values_come_near_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = random(3, *shape, dtype=dtype) * torch.tensor([1e-6, 1.0, 1e6], dtype=dtype)[:, None, None]
    found = orthogonalise(matrices, 5)
    assert found.dtype == dtype
    values = torch.linalg.svdvals(found.double())
    # What five steps give anywhere between a 485th of the norm and all of it: 0.68 to 1.13, before rounding.
    assert float(values.min()) > 0.67 and float(values.max()) < 1.2


def test_singular_values_go_through_the_polynomial_and_vectors_stay() -> None:
    matrix = random(12, 20)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(5):
        values = sum(c * values ** (2 * i + 1) for i, c in enumerate(COEFFICIENTS))
    torch.testing.assert_close(orthogonalise(matrix[None], 5)[0], left @ values.diag() @ right, rtol=1e-9, atol=1e-11)


def test_matrix_of_zeros_stays_so() -> None:
    assert not orthogonalise(torch.zeros(1, 4, 6), 5).any()


# --- updates -------------------------------------------------------------------------------------------------------------


def written_out(weight: Tensor, gradients: list[Tensor], *, nesterov: bool = True) -> Tensor:
    """The update of Moonlight, equation by equation, with singular vectors in place of Newton-Schulz steps."""
    weight, momentum = weight.clone(), torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + gradient
        direction = 0.95 * momentum + gradient if nesterov else momentum
        left, values, right = torch.linalg.svd(direction, full_matrices=False)
        values = values / direction.norm()
        for _ in range(5):
            values = sum(c * values ** (2 * i + 1) for i, c in enumerate(COEFFICIENTS))
        moved = left @ values.diag() @ right
        weight = weight - 0.02 * (0.2 * math.sqrt(max(weight.shape)) * moved + 0.1 * weight)
    return weight


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_matrix_moves_as_written_out(shape: tuple[int, int], nesterov: bool) -> None:
    weight = nn.Parameter(random(*shape))
    gradients = [random(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = written_out(weight.detach(), gradients, nesterov=nesterov)
    optimizer = optimizer_over({"w": weight}, {"w": MatrixRows()}, nesterov=nesterov)
    for gradient in gradients:
        weight.grad = 4.0 * gradient
        update(optimizer, divisor=4.0)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-11)


def test_matrix_moves_as_pytorchs_muon_does_in_bf16() -> None:
    ours, theirs = (nn.Parameter(random(24, 40, dtype=torch.float32)) for _ in range(2))
    optimizer = optimizer_over({"w": ours}, {"w": MatrixRows()}, torch.bfloat16)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    begin = ours.detach().clone()
    for seed in (1, 2, 3):
        ours.grad, theirs.grad = (random(24, 40, seed=seed, dtype=torch.float32) for _ in range(2))
        update(optimizer)
        reference.step()
    # Both round to bf16 in every product; theirs divides by the norm after rounding, ours before.
    difference = (ours - theirs).norm() / (ours.detach() - begin).norm()
    assert float(difference) < 0.02


def test_rest_moves_by_adamw_at_its_own_rate() -> None:
    ours = {"w": nn.Parameter(random(6, 4)), "norm": nn.Parameter(random(5))}
    reference = nn.Parameter(ours["norm"].detach().clone())
    optimizer = optimizer_over(ours, {"w": MatrixRows()}, adamw_lr_ratio=0.25)
    expected = torch.optim.AdamW([reference], lr=0.005, betas=(0.9, 0.95), weight_decay=0.0)
    for seed, rate in enumerate((0.02, 0.02, 0.01)):
        set_learning_rate(optimizer, rate)
        expected.param_groups[0]["lr"] = rate / 4
        ours["w"].grad = random(6, 4, seed=seed)
        ours["norm"].grad = random(5, seed=seed)
        reference.grad = random(5, seed=seed)
        update(optimizer)
        expected.step()
    torch.testing.assert_close(ours["norm"], reference, rtol=1e-12, atol=0)
    assert {name: set(optimizer.state[p]) for name, p in ours.items()} == {
        "w": {"momentum"},
        "norm": {"step", "exp_avg", "exp_avg_sq"},
    }


# --- fused parameters ----------------------------------------------------------------------------------------------------


def moved(weights: dict[str, Tensor], gradients: dict[str, Tensor], rows: dict[str, MatrixRows]) -> dict[str, Tensor]:
    """The parameters after two updates."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    optimizer = optimizer_over(parameters, rows)
    for _ in range(2):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        update(optimizer)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def expect_separate(fused: Tensor, gradient: Tensor, rows: MatrixRows, indices: dict[str, Tensor]) -> None:
    """Updating `fused` must equal updating each matrix, rows `indices` of it, by itself."""
    together = moved({"w": fused}, {"w": gradient}, {"w": rows})["w"]
    apart = moved(
        {name: fused[index] for name, index in indices.items()},
        {name: gradient[index] for name, index in indices.items()},
        dict.fromkeys(indices, MatrixRows()),
    )
    assert sorted(torch.cat(list(indices.values())).tolist()) == list(range(len(fused)))
    for name, index in indices.items():
        torch.testing.assert_close(together[index], apart[name], rtol=1e-10, atol=1e-12, msg=name)


def test_query_key_and_value_are_orthogonalised_apart() -> None:
    model = bind(run_of("llama", 1, "fp64")).model
    size, group, heads = model.head_size, model.n_heads // model.kv_heads, model.kv_heads
    grouped = torch.arange(heads * (group + 2) * size).view(heads, group + 2, size)
    indices = {
        "q": grouped[:, :group].flatten(),
        "k": grouped[:, group].flatten(),
        "v": grouped[:, group + 1].flatten(),
    }
    rows = bind(run_of("llama", 1, "fp64")).matrix_rows("blocks.0.attention.qkv.weight")
    assert rows is not None and group > 1
    expect_separate(
        random(grouped.numel(), model.d_model), random(grouped.numel(), model.d_model, seed=1), rows, indices
    )


def test_gate_and_up_are_orthogonalised_apart() -> None:
    bound = bind(run_of("llama", 1, "fp64"))
    width, hidden = bound.model.d_model, bound.model.ff_size
    alternating = torch.arange(2 * hidden).view(-1, 2, gate_block(hidden))
    rows = bound.matrix_rows("blocks.1.mlp.gate_up.weight")
    assert rows is not None
    indices = {"gate": alternating[:, 0].flatten(), "up": alternating[:, 1].flatten()}
    expect_separate(random(2 * hidden, width), random(2 * hidden, width, seed=1), rows, indices)


def test_experts_are_orthogonalised_apart() -> None:
    bound = bind(run_of("deepseek", 1, "fp64"))
    networks = ExpertNetworks(3, 6, 4)
    gate_up = torch.arange(3 * 8).view(3, -1, 2, networks.block)
    name = "blocks.1.mlp.experts"
    found = {one: bound.matrix_rows(f"{name}.{one}") for one in ("gate_up", "down")}
    assert found == {"gate_up": MatrixRows(8, (1, 1)), "down": MatrixRows(8)}
    indices = {f"{what}{e}": gate_up[e, :, i].flatten() for e in range(3) for i, what in enumerate(("gate", "up"))}
    expect_separate(random(24, 6), random(24, 6, seed=1), MatrixRows(3, (networks.block,) * 2), indices)
    down = torch.arange(3 * 6).view(3, 6)
    expect_separate(random(18, 4), random(18, 4, seed=1), MatrixRows(3), {str(e): down[e] for e in range(3)})


def test_weather_attention_is_three_matrices() -> None:
    declared = DeclaredWeather(small(), 1)
    size = declared.model.head_size
    assert declared.matrix_rows("blocks.0.attention.qkv.weight") == MatrixRows(pattern=(size, size, size))
    assert declared.matrix_rows("blocks.0.mlp.up.weight") == MatrixRows()


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight", "blocks.1.mlp.router.weight", "head.norm.weight"])
def test_embedding_head_norms_and_routers_are_no_matrices(name: str) -> None:
    assert bind(run_of("deepseek", 1, "fp64")).matrix_rows(name) is None


# --- clipped, skipped and unfit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, None])
def test_clipping_scales_what_momentum_gathers(limit: float | None) -> None:
    weight = nn.Parameter(random(5, 7))
    expected = weight.detach().clone()
    optimizer = optimizer_over({"w": weight}, {"w": MatrixRows()})
    gradients = [scale * random(5, 7, seed=seed) for seed, scale in ((1, 10.0), (2, 0.01))]
    for gradient in gradients:
        weight.grad = gradient.clone()
        divisor, skip = clip_or_skip(torch.tensor(1.0), local_gradient_norm([weight]), limit)
        MUON.update(optimizer, divisor, skip)
    clipped = gradients if limit is None else [g * min(1.0, limit / float(g.norm())) for g in gradients]
    # The divisor is a float32 number.
    torch.testing.assert_close(weight.detach(), written_out(expected, clipped), rtol=1e-6, atol=1e-7)


def test_nothing_changes_in_a_skipped_update() -> None:
    parameters = {"w": nn.Parameter(random(5, 7)), "norm": nn.Parameter(random(3))}
    optimizer = optimizer_over(parameters, {"w": MatrixRows()})
    for bad in (False, True):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, math.nan if bad else 1.0)
        before = {name: (p.detach().clone(), dict(optimizer.state[p])) for name, p in parameters.items()}
        before = {name: (p, {k: v.clone() for k, v in state.items()}) for name, (p, state) in before.items()}
        update(optimizer, skip=float(bad))
    for name, parameter in parameters.items():
        values, state = before[name]
        assert torch.equal(parameter, values)
        assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())


def test_fp16_runs_orthogonalise_in_bf16() -> None:
    assert WholeMatrices(dtype=torch.float16).dtype == torch.bfloat16
    assert WholeMatrices(dtype=torch.float32).dtype == torch.float32


def test_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="muon has none"):
        optimizer_over({"w": nn.Parameter(random(2, 2))}, {}, options={"momentum": 0.9})


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (256, 64)])
def test_flops_are_those_of_the_products(rows: int, columns: int) -> None:
    # x x^T and (b gram + c gram^2) x of short by long, and gram^2.
    step = 2 * (2 * 64 * 64 * 256) + 2 * 64**3
    assert MUON.matrix_flops(config(newton_schulz_steps=3), rows, columns) == 3 * step
    with FlopCounterMode(display=False) as counted:
        orthogonalise(torch.empty(1, rows, columns, device="meta"), 3)
    assert counted.get_total_flops() == 3 * step
