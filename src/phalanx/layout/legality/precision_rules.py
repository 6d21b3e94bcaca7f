"""Rules about recipes that multiply in 8 bits: what shares a scale stays together, and gradients come from one node."""

from __future__ import annotations

from phalanx.config.schema import SCALED_TOGETHER
from phalanx.layout.legality.rule import Fix, Requirements, Rule
from phalanx.layout.spec import Bools, LayoutTable, ResolvedLayout

_WHOLE_MATRICES: Fix = {"layout.gather": "layer"}
_BF16: Fix = {"layout.precision": "bf16"}


def _cut_blocks(needs: Requirements, tp: int) -> list[str]:
    """Return what is said of each matrix whose blocks of numbers with one scale `tp` ranks would cut."""
    size = SCALED_TOGETHER.get(needs.run.layout.precision)
    if size is None or tp == 1:
        return []
    found = needs.model.split_features()
    if found is None:
        return [f"models of family {needs.run.model.family} do not say which features layout.tp={tp} splits"]
    return [
        f"layout.tp={tp} gives ranks {one.count / tp:g} of the {one.count} features of {one.field}, which is no multiple of "
        f"the {size} that share a scale"
        for one in found
        if one.count % (tp * size)
    ]


def _cuts_blocks(needs: Requirements, layouts: LayoutTable) -> Bools | bool:
    broken: Bools | bool = False
    for tp in set(layouts.tp.tolist()):
        if _cut_blocks(needs, tp):
            broken = broken | (layouts.tp == tp)
    return broken


def _explain_blocks(needs: Requirements, layout: ResolvedLayout) -> str:
    name = needs.run.layout.precision
    return "\n".join(f"layout.precision={name}: {reason}" for reason in _cut_blocks(needs, layout.tp))


PRECISION_RULES = (
    Rule(
        reads=("tp",),
        broken=_cuts_blocks,
        message=_explain_blocks,
        fixes=({"layout.precision": "fp8-row"}, _BF16),
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
