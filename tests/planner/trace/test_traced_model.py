"""The attention kernel that cost models count: the one that runs in a run's precision, not the one that it names."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config.load import load_run
from phalanx.families.registry import bind
from phalanx.planner.trace.traced_model import Kernel, TracedModel
from weather_runs import EXAMPLES

CASES: tuple[tuple[dict[str, Any], Kernel, Kernel], ...] = (
    # asked for; on NVIDIA, on AMD devices
    ({}, "flash", "flash"),
    ({"training.attention": "cudnn"}, "cudnn", "flash"),
    ({"training.attention": "efficient"}, "efficient", "efficient"),
    ({"data.document_mask": "true"}, "flex", "efficient"),
    ({"layout.precision": "fp32"}, "efficient", "efficient"),
    ({"layout.precision": "fp32", "training.attention": "flash"}, "efficient", "efficient"),
    ({"layout.precision": "fp32", "training.attention": "cudnn"}, "efficient", "efficient"),
    ({"layout.precision": "fp32", "training.attention": "math"}, "math", "math"),
    ({"layout.precision": "fp64"}, "math", "math"),
    ({"layout.precision": "fp64", "data.document_mask": "true"}, "math", "math"),
    ({"layout.precision": "fp64", "training.attention": "efficient"}, "math", "math"),
)


@pytest.mark.parametrize(("changes", "nvidia", "amd"), CASES)
def test_kernels_of_language_models(changes: dict[str, Any], nvidia: Kernel, amd: Kernel) -> None:
    run = load_run(EXAMPLES / "llama3-8b.yaml", [f"{name}={value}" for name, value in changes.items()])
    model = bind(run, TracedModel)
    assert (model.likely_kernel(rocm=False), model.likely_kernel(rocm=True)) == (nvidia, amd)


@pytest.mark.parametrize(("precision", "kernel"), [("bf16", "flash"), ("fp32", "efficient"), ("fp64", "math")])
def test_kernels_of_weather_models(precision: str, kernel: Kernel) -> None:
    run = load_run(EXAMPLES / "climax-small.yaml", [f"layout.precision={precision}"])
    model = bind(run, TracedModel)
    assert model.likely_kernel(rocm=False) == model.likely_kernel(rocm=True) == kernel
