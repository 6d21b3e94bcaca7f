"""Rules about what lies in host memory. Optimizers of other packages are asked when they are built: that loads them."""

from __future__ import annotations

from phalanx.layout.legality.rule import Rule

OFFLOAD_RULES = (
    Rule(
        reads=("offload_optimizer",),
        broken=lambda needs, t: t.offload_optimizer & (needs.run.optimizer.name == "muon"),
        message="layout.offload_optimizer=true updates some parameters after the others, and "
        "optimizer.name={needs.run.optimizer.name} works on matrices of all of them at a time",
        fixes=({"layout.offload_optimizer": False}, {"optimizer.name": "adamw"}),
    ),
)
