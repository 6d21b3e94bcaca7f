"""muP: what a few steps change of a model's outputs does not depend on its width (a coordinate check), nor at its base."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layout_runs import run_with
from phalanx.config.model import LanguageModel
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun, require_language
from phalanx.families.language.evaluation.width_check import WidthCheck, check_widths
from phalanx.families.registry import bind
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.step import build_step
from whole_model import CPU, laid_out

WIDTHS = (64, 128, 256, 512)


def small_run(changes: dict[str, object] | None = None) -> LanguageRun:
    shape = {"model.d_model": 64, "model.n_heads": 4, "model.n_kv_heads": 4, "model.d_ff": 128, "optimizer.lr": 0.01}
    return require_language(run_with({**shape, **(changes or {})}, precision="fp32", global_batch=4), "this test")


@pytest.fixture(scope="module")
def checked() -> WidthCheck:
    return check_widths(small_run(), WIDTHS)


def test_outputs_change_alike_at_all_widths_under_mup_alone(checked: WidthCheck) -> None:
    assert abs(checked.growth["muP"]["logits"]) < 0.3 and checked.passed
    assert checked.growth["usual"]["logits"] > 0.8


def test_a_rule_that_does_not_scale_is_found(checked: WidthCheck) -> None:
    wrong = replace(checked, changes={"muP": checked.changes["usual"], "usual": checked.changes["usual"]})
    assert not wrong.passed


def test_nothing_changes_at_the_base_width(checked: WidthCheck) -> None:
    assert checked.changes["muP"]["logits"][0] == checked.changes["usual"]["logits"][0]


@pytest.mark.parametrize(("widths", "words"), [((64, 128), "three widths or more"), ((64, 120, 256), "multiple of 16")])
def test_widths_that_no_such_decoder_has_are_refused(widths: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_widths(small_run(), widths)


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
