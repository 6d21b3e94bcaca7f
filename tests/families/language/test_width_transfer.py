"""muP: what a few steps change of a model's outputs does not depend on its width (a coordinate check), nor at its base."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layout_runs import run_with
from phalanx.config.model import LanguageModel
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.step import build_step
from whole_model import CPU, laid_out, samples_of

WIDTHS = (64, 128, 256, 512)


def change_of_logits(width: int, base: int | None) -> float:
    """Root mean square of what three steps of AdamW change of the logits."""
    heads = width // 16
    shape = {"n_layers": 2, "d_model": width, "n_heads": heads, "n_kv_heads": heads, "d_ff": 2 * width}
    changes = {f"model.{name}": value for name, value in shape.items()} | {"model.mup_base_width": base}
    run = run_with({**changes, "optimizer.lr": 0.01}, precision="fp32", global_batch=4)
    layout = ResolvedLayout(4)
    applied = laid_out(run, layout)
    step, batch = build_step(bind(run), applied, CPU), samples_of(run, layout, ONE_RANK)
    model = applied.stages[0].part
    before = model.logits(batch.tokens)
    for number in range(1, 4):
        step.run(number, batch)
    return float((model.logits(batch.tokens) - before).square().mean().sqrt())


def growth(base: int | None) -> float:
    """Exponent with which the change grows with the width."""
    changes = [change_of_logits(width, base) for width in WIDTHS]
    return float(np.polyfit(np.log(WIDTHS), np.log(changes), 1)[0])


def test_outputs_change_alike_at_all_widths_under_mup_alone() -> None:
    assert abs(growth(64)) < 0.2
    assert growth(None) > 0.5


def test_nothing_changes_at_the_base_width() -> None:
    assert change_of_logits(64, 64) == change_of_logits(64, None)


@pytest.mark.parametrize("part", [{"tied_head": True}, {"experts": {"count": 4, "active": 1, "d_ff": 8}}])
def test_models_without_a_rule_are_refused(part: dict[str, object]) -> None:
    shape = {"n_layers": 1, "d_model": 32, "n_heads": 2, "vocab_size": 61, "max_positions": 32}
    with pytest.raises(ValueError, match="mup_base_width=16 has no rule for"):
        LanguageModel.model_validate({**shape, "mup_base_width": 16, **part})


def test_rates_and_initial_values_scale_as_in_table_3() -> None:
    torch.manual_seed(0)
    wide = {"model.d_model": 128, "model.mup_base_width": 32, "model.n_heads": 8, "model.n_kv_heads": 8}
    run = run_with(wide, precision="fp32", global_batch=4)
    applied = laid_out(run, ResolvedLayout(4))
    spread = {name: float(p.detach().std()) for name, p in applied.parameters.items()}
    assert spread["embedding.weight"] == pytest.approx(0.02, rel=0.1)
    assert spread["head.weight"] == pytest.approx(0.02 / 4, rel=0.1)
    assert spread["blocks.0.attention.qkv.weight"] == pytest.approx(0.02 / 2, rel=0.1)
    rates = {
        id(p): group["lr"]
        for group in build_step(bind(run), applied, CPU).optimizer.param_groups
        for p in group["params"]
    }
    found = {name: rates[id(p)] / run.optimizer.lr for name, p in applied.parameters.items()}
    assert found["embedding.weight"] == found["blocks.0.mlp_norm.weight"] == 1.0
    assert found["head.weight"] == found["blocks.1.mlp.down.weight"] == 0.25
