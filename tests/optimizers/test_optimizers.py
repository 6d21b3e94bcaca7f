"""Optimizers by name: parameter groups, clipped and skipped updates, one that a program brings along, what it costs."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from phalanx.config.schema import Optimizer
from phalanx.errors import ConfigError
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.registry import bind
from phalanx.layout.data_parallel.gradients import local_gradient_norm
from phalanx.layout.resolve import resolve_layout
from phalanx.optimizers import OPTIMIZERS, OptimizerKind, build_optimizer, find_optimizer, set_learning_rate
from phalanx.optimizers.optimizer_kind import Group, HeldParameters
from phalanx.training.step import clip_or_skip
from state_bytes import state_bytes
from whole_model import GPT, whole_run

parameter_kind = DeclaredLanguage(whole_run(GPT).model, 1).parameter_kind


class Named(nn.Module):
    """Parameters with the names the decoder gives them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Module()
        self.embedding.weight = nn.Parameter(torch.randn(5, 4, generator=generator))
        self.up = nn.Module()
        self.up.weight = nn.Parameter(torch.randn(6, 4, generator=generator))
        self.up.bias = nn.Parameter(torch.randn(6, generator=generator))
        self.mlp_norm = nn.Module()
        self.mlp_norm.weight = nn.Parameter(torch.randn(4, generator=generator))

    def set_gradients(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(4)
        for parameter in self.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def config(**fields: object) -> Optimizer:
    return Optimizer.model_validate({"lr": 1e-2, "weight_decay": 0.1, **fields})


def update(optimizer: torch.optim.Optimizer, model: nn.Module, loss: float, limit: float | None) -> None:
    divisor, skip = clip_or_skip(torch.tensor(loss), local_gradient_norm(model.parameters()), limit)
    find_optimizer(config()).update(optimizer, divisor, skip)


def test_by_default_only_matrices_decay() -> None:
    model = Named()
    decayed, free = build_optimizer(dict(model.named_parameters()), config(), parameter_kind).param_groups
    assert [p is model.up.weight for p in decayed["params"]] == [True]
    assert decayed["weight_decay"] == 0.1
    assert len(free["params"]) == 3
    assert free["weight_decay"] == 0.0


def test_decay_is_configurable() -> None:
    groups = build_optimizer(dict(Named().named_parameters()), config(no_decay=("norm",)), parameter_kind).param_groups
    assert [len(group["params"]) for group in groups] == [3, 1]
    (only,) = build_optimizer(dict(Named().named_parameters()), config(no_decay=()), parameter_kind).param_groups
    assert len(only["params"]) == 4


@pytest.mark.parametrize("limit", [0.5, 1e6, None])
def test_update_equals_clipping_and_then_adamw(limit: float | None) -> None:
    ours, reference = Named(), Named()
    optimizer = build_optimizer(dict(ours.named_parameters()), config(), parameter_kind)
    expected = torch.optim.AdamW(
        [
            {"params": [reference.up.weight], "weight_decay": 0.1},
            {"params": [reference.embedding.weight, reference.up.bias, reference.mlp_norm.weight], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        for model in (ours, reference):
            model.set_gradients(1.0 + step)
        update(optimizer, ours, 1.0, limit)
        nn.utils.clip_grad_norm_(reference.parameters(), limit or float("inf"))
        expected.step()
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf")), (1.0, float("nan"))])
def test_nothing_changes_where_loss_or_gradient_is_not_finite(loss: float, gradient: float) -> None:
    model = Named()
    optimizer = build_optimizer(dict(model.named_parameters()), config(), parameter_kind)
    model.set_gradients(1.0)
    update(optimizer, model, 1.0, 1.0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.set_gradients(gradient)
    update(optimizer, model, loss, 1.0)
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_gradient_norm_counts_every_element_once() -> None:
    model = Named()
    model.set_gradients(1.0)
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float(local_gradient_norm(model.parameters())) == pytest.approx(float(flat.norm()), rel=1e-6)


def test_learning_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(dict(Named().named_parameters()), config(), parameter_kind)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


class MomentumKind(OptimizerKind):
    """Plain PyTorch, as another package would bring it."""

    state_values = 1
    value_passes = 4

    def build(self, groups: Sequence[Group], config: Optimizer, held: HeldParameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=config.lr, momentum=float(config.options["momentum"]))


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> Optimizer:
    # For one test: messages list the optimizers that are known, and those of other tests are compared word for word.
    monkeypatch.setattr(OPTIMIZERS, "_items", {})
    OPTIMIZERS.register("test_momentum", MomentumKind())
    return config(name="test_momentum", options={"momentum": 0.5})


@pytest.mark.parametrize("limit", [0.5, None])
def test_another_optimizer_is_found_by_name_and_updates(momentum: Optimizer, limit: float | None) -> None:
    ours, reference = Named(), Named()
    optimizer = build_optimizer(dict(ours.named_parameters()), momentum, parameter_kind)
    decayed, *free = (reference.up.weight, reference.embedding.weight, reference.up.bias, reference.mlp_norm.weight)
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    expected = torch.optim.SGD(groups, lr=1e-2, momentum=0.5)
    for step, loss in enumerate((1.0, 2.0, float("nan"))):
        for model in (ours, reference):
            model.set_gradients(1.0 + step)
        divisor, skip = clip_or_skip(torch.tensor(loss), local_gradient_norm(ours.parameters()), limit)
        find_optimizer(momentum).update(optimizer, divisor, skip)
        nn.utils.clip_grad_norm_(reference.parameters(), limit or float("inf"))
        if step < 2:
            expected.step()
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_an_optimizer_that_is_not_there_and_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name=adam: .*did you mean adamw\? known: adamw"):
        build_optimizer(dict(Named().named_parameters()), config(name="adam"), parameter_kind)
    with pytest.raises(ConfigError, match=r"optimizer\.options=\{'momentum': 0.5\}: adamw has none"):
        build_optimizer(dict(Named().named_parameters()), config(options={"momentum": 0.5}), parameter_kind)


def test_training_memory_counts_the_state_of_the_optimizer_that_is_named(momentum: Optimizer) -> None:
    run = whole_run(GPT)
    layout = resolve_layout(bind(run), 1)
    adamw, lighter = (state_bytes(bind(one), layout) for one in (run, run.model_copy(update={"optimizer": momentum})))
    assert adamw.optimizer == 2 * adamw.parameters
    assert lighter.optimizer == lighter.parameters == adamw.parameters
