"""cuEquivariance's kernels are for long trainings in fp32; what is told of them is what a run does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from materials_cases import run_of
from phalanx.families.materials import step_kernels
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.layout import MaterialsStage
from phalanx.families.materials.model.message_passing import segmented_products
from phalanx.families.registry import bind
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import BuildContext, LayoutModel
from phalanx.layout.mesh import Axis
from phalanx.nn.splits import ModelChunk
from phalanx.training.inputs import TrainableModel

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def kernels_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NVIDIA device with cuEquivariance."""
    monkeypatch.setattr(segmented_products, "is_rocm", lambda: False)
    monkeypatch.setattr(segmented_products, "_kernels_are_there", lambda: True)
    monkeypatch.setattr(step_kernels, "keep_compiled_kernels", lambda: tmp_path)


def made_run(
    kernels: str, *, steps: int = 10_000, precision: str = "fp32", width: int = 32, compiled: bool | str = "auto"
) -> MaterialsRun:
    run = run_of("mace", 1, precision)
    mace = run.model.mace.model_copy(update={"kernels": kernels})
    model = run.model.model_copy(update={"d_model": width, "mace": mace})
    training = run.training.model_copy(update={"steps": steps, "compile": compiled})
    return run.model_copy(update={"model": model, "training": training})


RUNS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "long": ({"kernels": "auto"}, True, "kernels cuEquivariance's"),
    "too short": ({"kernels": "auto", "steps": 9_999}, False, ""),
    "exact": ({"kernels": "auto", "precision": "fp64"}, False, ""),
    "half": ({"kernels": "auto", "precision": "bf16"}, False, ""),
    "narrow": ({"kernels": "auto", "width": 40}, False, ""),
    "own": ({"kernels": "own"}, False, ""),
    "asked for": ({"kernels": "cuequivariance", "steps": 2, "precision": "fp64"}, True, "kernels cuEquivariance's"),
    "asked for, narrow": ({"kernels": "cuequivariance", "width": 40}, False, "a width that 32 divides, not 40"),
}


@pytest.mark.parametrize("name", RUNS)
def test_captured_steps_take_kernels_that_pay(name: str) -> None:
    fields, wanted, words = RUNS[name]
    run = made_run(**fields)
    share = SequenceShare(Axis("cp"), Axis("tp"), "ring")
    building = BuildContext(DEVICE, AttentionChoice("sdpa"), share)
    stage, _ = bind(run, LayoutModel).build_stage(building, ModelChunk(range(run.model.n_layers)), 0)
    assert isinstance(stage, MaterialsStage) and stage.capture is not None
    asked = run.model.mace.kernels == "cuequivariance"
    # A network that is evaluated, saved and checked computes by what is exact, unless the run file says otherwise.
    assert [module.fused for module in stage.part.modules() if hasattr(module, "fused")] == [asked] * 4
    dtype = bind(run, LayoutModel).precision.compute_dtype
    assert step_kernels.steps_have_kernels(run, DEVICE, dtype) == wanted
    notes = bind(run, TrainableModel).notes_of_kernels(DEVICE)
    assert [words in note for note in notes] == [True] * bool(words)


def test_a_captured_step_has_a_network_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[str] = []
    run = made_run("auto")
    layout = bind(run, LayoutModel)
    share = SequenceShare(Axis("cp"), Axis("tp"), "ring")
    built = type(layout)._build_network

    def build(self: Any, building: BuildContext, part: ModelChunk, config: Any) -> Any:
        kernels.append(config.mace.kernels)
        return built(self, building, part, config)

    monkeypatch.setattr(type(layout), "_build_network", build)
    stage, _ = layout.build_stage(
        BuildContext(DEVICE, AttentionChoice("sdpa"), share), ModelChunk(range(run.model.n_layers)), 0
    )
    assert isinstance(stage, MaterialsStage) and stage.capture is not None
    with contextlib.suppress(AssertionError, RuntimeError):
        # On a machine without such a device it has no memory for parameters.
        stage.capture._make_replica()
    assert kernels == ["auto", "cuequivariance"]


@pytest.mark.parametrize("body", ["mace", "painn"])
def test_nothing_is_told_of_kernels_that_do_nothing(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run("auto", compiled=False)
    if body != "mace":
        run = run_of(body, 1, "fp32")
    assert list(bind(run, TrainableModel).notes_of_kernels(DEVICE)) == []
    monkeypatch.setattr(segmented_products, "_kernels_are_there", lambda: False)
    assert list(bind(made_run("auto"), TrainableModel).notes_of_kernels(DEVICE)) == []
