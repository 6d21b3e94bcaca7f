"""Rules about what lies in host memory. Optimizers of other packages are asked when they are built: that loads them."""

from __future__ import annotations

from phalanx.layout.legality.rule import Fix, Rule

_STAY: Fix = {"layout.offload_activations": False}

OFFLOAD_RULES = (
    Rule(
        reads=("offload_optimizer",),
        broken=lambda needs, t: t.offload_optimizer & (needs.run.optimizer.name == "muon"),
        message="layout.offload_optimizer=true updates some parameters after the others, and "
        "optimizer.name={needs.run.optimizer.name} works on matrices of all of them at a time",
        fixes=({"layout.offload_optimizer": False}, {"optimizer.name": "adamw"}),
    ),
    Rule(
        reads=("offload_activations",),
        broken=lambda needs, t: t.offload_activations & (not needs.offloads_activations),
        message="layout.offload_activations=true: models of family {needs.run.model.family} read activations more than once",
        fixes=(_STAY,),
    ),
    Rule(
        reads=("pp", "schedule", "offload_activations"),
        broken=lambda _, t: t.offload_activations & t.splits_backward,
        message="layout.schedule={x.schedule} reads activations twice, and layout.offload_activations=true brings them "
        "back once",
        fixes=(_STAY, {"layout.schedule": "interleaved_1f1b"}),
    ),
    Rule(
        reads=("pp", "stages_per_rank", "offload_activations"),
        broken=lambda needs, t: t.offload_activations & (t.n_stages >= needs.run.model.n_layers),
        message="layout.offload_activations=true leaves those of each stage's last block on the device, which are all with "
        "{x.n_stages} stages and model.n_layers={needs.run.model.n_layers}",
        fixes=(_STAY,),
    ),
)
