"""Trainings with something in host memory, beside the same with all of it on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.verification.family import VerifiableModel
from phalanx.verification.record_training import record_training
from whole_model import CPU


def offload_alike(model: VerifiableModel, layout: ResolvedLayout, mesh: Mesh, field: str) -> bool:
    """Return whether two steps leave the same bits on this rank with `field` of the layout, a bool, true and false."""
    there, here = (
        record_training(model, replace(layout, **{field: offloaded}), mesh, CPU, steps=2, activations=False)
        for offloaded in (True, False)
    )
    return all(torch.equal(there.parameters[name].local, here.parameters[name].local) for name in here.parameters)
