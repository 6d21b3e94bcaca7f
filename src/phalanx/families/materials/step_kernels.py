"""Whether the steps of a training are computed by cuEquivariance's kernels, as `model.mace.kernels` says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.families.materials.config import MaterialsRun, one_program_obstacle
from phalanx.families.materials.model.message_passing.segmented_products import (
    keep_compiled_kernels,
    why_no_kernels,
)

_PAYS_FROM = 10_000
"""Steps of a training from which on faster steps make up for a slower start: on an H200 a step of a thousand atoms is 4 ms
faster, and a training begins 6 s later with compiled kernels, 47 s later without."""


def steps_have_kernels(run: MaterialsRun, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether captured steps take cuEquivariance's kernels, where they compute on `device` in format `dtype`."""
    if run.model.body != "mace" or run.model.mace.kernels == "own":
        return False
    if run.model.mace.kernels == "auto" and (run.training.steps < _PAYS_FROM or dtype != torch.float32):
        return False
    return not why_no_kernels(device, dtype, run.model.d_model)


def kernel_notes(run: MaterialsRun, device: torch.device, dtype: torch.dtype) -> Sequence[str]:
    """Return what a person who waits for the first step should know of these kernels."""
    options = run.model.mace
    if steps_have_kernels(run, device, dtype):
        captured = run.training.compile is not False and one_program_obstacle(run) is None
        if options.kernels == "auto" and not captured:
            return ()
        folder = keep_compiled_kernels()
        kept = "nowhere, for want of a folder to write to" if folder is None else f"in {folder}"
        return (f"kernels cuEquivariance's; they are compiled once, which takes a minute, and kept {kept}",)
    if run.model.body != "mace" or options.kernels != "cuequivariance":
        return ()
    reason = why_no_kernels(device, dtype, run.model.d_model)
    return (f"kernels own: cuEquivariance computes nothing of this run, as {reason}",)
