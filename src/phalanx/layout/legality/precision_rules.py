"""Rules about numbers in 8 bits: what shares a scale stays together, and gradients of their products come from one node."""

from __future__ import annotations

import numpy as np

from phalanx.config.schema import MOMENT_BLOCK, SCALED_TOGETHER
from phalanx.layout.legality.rule import Fix, Requirements, Rule
from phalanx.layout.spec import Bools, LayoutTable

_WHOLE_MATRICES: Fix = {"layout.gather": "layer"}
_BF16: Fix = {"layout.precision": "bf16"}
_WHOLE_MOMENTS: Fix = {"optimizer.name": "adamw"}


def _cut_blocks(needs: Requirements, tp: int) -> list[str]:
    """Return what is said of each matrix whose blocks of numbers with one scale `tp` ranks would cut."""
    precision, optimizer = needs.run.layout.precision, needs.run.optimizer.name
    sizes = {}
    if precision in SCALED_TOGETHER:
        sizes[f"layout.precision={precision}"] = SCALED_TOGETHER[precision]
    if optimizer == "adamw8bit":
        sizes[f"optimizer.name={optimizer}"] = MOMENT_BLOCK
    if not sizes or tp == 1:
        return []
    # Ranks that shared a scale would have to agree on it for every block: they get whole blocks instead.
    features = needs.model.split_features()
    if features is None:
        return [f"models of family {needs.run.model.family} do not say which features layout.tp={tp} splits"]
    return [
        f"{field}: layout.tp={tp} gives ranks {one.count / tp:g} of the {one.count} features of {one.field}, which is no "
        f"multiple of the {size} that share a scale"
        for field, size in sizes.items()
        for one in features
        if one.count % (tp * size)
    ]


def _cuts_blocks(needs: Requirements, layouts: LayoutTable) -> Bools | bool:
    broken: Bools | bool = False
    for tp in set(layouts.tp.tolist()):
        if _cut_blocks(needs, tp):
            broken = broken | (layouts.tp == tp)
    return broken


def _cuts_moments(needs: Requirements, layouts: LayoutTable) -> Bools:
    hidden = needs.expert_slices.count * needs.expert_slices.together
    cut = (layouts.expert_tp > 1) & (hidden % (layouts.expert_tp * MOMENT_BLOCK) != 0)
    return np.asarray((needs.run.optimizer.name == "adamw8bit") & cut)


PRECISION_RULES = (
    Rule(
        reads=("tp",),
        broken=_cuts_blocks,
        message=lambda needs, x: "\n".join(_cut_blocks(needs, x.tp)),
        fixes=({"layout.precision": "fp8-row"}, _BF16, _WHOLE_MOMENTS),
    ),
    Rule(
        reads=("expert_tp",),
        broken=_cuts_moments,
        message="optimizer.name={needs.run.optimizer.name}: layout.expert_tp={x.expert_tp} cuts "
        f"{{needs.expert_slices.field}} within the {MOMENT_BLOCK} features that share a scale",
        fixes=({"layout.expert_tp": 1}, _WHOLE_MOMENTS),
    ),
    Rule(
        reads=("expert_tp",),
        broken=lambda needs, t: (t.expert_tp > 1) & (needs.run.layout.precision == "fp8-row-experts"),
        message="layout.expert_tp={x.expert_tp} cuts the features of an expert that share a scale in "
        "layout.precision=fp8-row-experts",
        fixes=({"layout.expert_tp": 1}, {"layout.precision": "fp8-row"}),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (needs.run.optimizer.name == "adamw8bit"),
        message="layout.gather=stream cuts matrices where features end, and with optimizer.name={needs.run.optimizer.name} "
        f"{MOMENT_BLOCK} of them share a scale",
        fixes=(_WHOLE_MATRICES, _WHOLE_MOMENTS),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & needs.run.layout.in_8_bits,
        message="layout.gather=stream has chunks of a matrix, and scales of layout.precision={needs.run.layout.precision} "
        "are found from whole ones",
        fixes=(_WHOLE_MATRICES, _BF16),
    ),
    Rule(
        reads=("pp", "schedule"),
        broken=lambda needs, t: t.splits_backward & needs.run.layout.in_8_bits,
        message="layout.schedule={x.schedule} asks for gradients of inputs and of weights apart, which "
        "layout.precision={needs.run.layout.precision} quantises and forms together",
        fixes=({"layout.schedule": "interleaved_1f1b"}, _BF16),
    ),
)
