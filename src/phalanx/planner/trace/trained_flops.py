"""Floating-point operations that training needs where some parameters are frozen: their gradients are never formed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from phalanx.families.family import BoundModel
from phalanx.nn.adapters import EVERY_PARAMETER, TrainedParameters
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import PartName, Setting, TracedModel


def trained_flops_per_sample(model: BoundModel) -> float:
    """Return the model FLOPs of one sample, forward and backward, without gradients of frozen parameters.

    What freezing saves, and what adapters add, is read off the products of the traced parts; the rest is
    `BoundModel.flops_per_sample`. Models that cannot be traced count as trained whole.
    """
    whole, trained = model.flops_per_sample(), TrainedParameters.of(model.run.training)
    if trained == EVERY_PARAMETER or not isinstance(model, TracedModel):
        return whole
    setting = Setting(model.config, model.positions().count, compile=False)
    passes = sum(share * one.passes.trained for one, share in model.sample_shapes())
    return whole - passes * (_product_flops(setting) - _product_flops(replace(setting, trained=trained)))


@cache
def _product_flops(setting: Setting) -> float:
    """Return the FLOPs of all matrix products of one sample."""
    leading = setting.model.leading_layers
    counts: dict[PartName, int] = {
        "embedding": 1,
        "leading": leading,
        "block": setting.model.n_layers - leading,
        "head": 1,
    }
    return float(
        sum(
            count * operation.matmul.flops * operation.times
            for name, count in counts.items()
            if count
            for operation in part_costs(name, setting, 1).costs.operations
            if operation.matmul is not None
        )
    )
