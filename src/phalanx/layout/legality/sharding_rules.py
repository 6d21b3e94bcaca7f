"""Rules about ZeRO levels, freed parameters, streamed weights, and what lies in host memory.

Optimizers of other packages are asked about host memory when they are built: that loads them.
"""

from __future__ import annotations

from phalanx.layout.legality.rule import Fix, Rule

_GATHER_WHOLE: Fix = {"layout.gather": "layer"}

SHARDING_RULES = (
    Rule(
        reads=("zero", "dp_shard"),
        broken=lambda _, t: (t.zero == 0) & (t.dp_shard > 1),
        message="layout.zero=0 keeps everything on every rank, so layout.dp_shard={x.dp_shard} has nothing to share out",
        fixes=lambda x: ({"layout.dp_replicate": x.dp_replicate * x.dp_shard, "layout.dp_shard": 1},),
    ),
    # ZeRO 1 and 2 keep all parameters on every rank.
    Rule(
        reads=("zero", "reshard_after_forward"),
        broken=lambda _, t: t.reshard_after_forward & (t.zero < 3),
        message="layout.reshard_after_forward=true frees gathered parameters, which layout.zero={x.zero} never shares out",
        fixes=({"layout.reshard_after_forward": "auto"}, {"layout.zero": 3}),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (needs.experts is not None),
        message="layout.gather=stream sends the matrices of a block round a ring in the order of its features, and experts "
        "are used in the order of tokens",
        fixes=({"layout.gather": "layer"},),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: (
            t.has("gather", "stream") & (bool(needs.run.training.freeze) or needs.run.training.lora is not None)
        ),
        message="layout.gather=stream sends gradients of all matrices of a block round a ring, and training.freeze and "
        "training.lora leave some without",
        fixes=(_GATHER_WHOLE,),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (not needs.streams_weights),
        message="layout.gather=stream: models of family {needs.run.model.family} have no matrix chains to stream",
        fixes=(_GATHER_WHOLE,),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (needs.unstreamable != ""),
        message="layout.gather=stream computes with some heads at a time, which {needs.unstreamable} does not allow",
        fixes=(_GATHER_WHOLE,),
    ),
    Rule(
        reads=("gather", "zero"),
        broken=lambda _, t: t.has("gather", "stream") & (t.zero != 3),
        message="layout.gather=stream keeps no gathered parameters between passes, which layout.zero={x.zero} does",
        fixes=({"layout.zero": 3}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather", "recompute"),
        broken=lambda _, t: t.has("gather", "stream") & t.has("recompute", "selective"),
        message="layout.gather=stream computes hidden features again anyway, "
        "and layout.recompute=selective would keep them",
        fixes=({"layout.recompute": "none"}, {"layout.recompute": "full"}, _GATHER_WHOLE),
    ),
    # Ulysses exchanges all heads at once, of which a streamed projection has computed some alone.
    Rule(
        reads=("gather", "cp", "context"),
        broken=lambda _, t: t.has("gather", "stream") & (t.cp > 1) & t.has("context", "all_to_all"),
        message="layout.gather=stream has some heads at a time, and layout.context=all_to_all shares all out over "
        "layout.cp={x.cp}",
        fixes=({"layout.context": "ring"}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather", "pp", "schedule"),
        broken=lambda _, t: t.has("gather", "stream") & t.splits_backward,
        message="layout.gather=stream gives gradients of inputs and of weights together, layout.schedule={x.schedule} "
        "asks for them apart",
        fixes=({"layout.schedule": "interleaved_1f1b"}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & needs.run.layout.scales_loss,
        message="layout.gather=stream leaves some gradients plain and some sharded, which the loss scaling of "
        "layout.precision={needs.run.layout.precision} cannot undo together",
        fixes=({"layout.precision": "bf16"}, _GATHER_WHOLE),
    ),
    Rule(
        reads=("gather",),
        broken=lambda needs, t: t.has("gather", "stream") & (needs.run.training.compile is True),
        message="layout.gather=stream sends messages inside blocks, which training.compile=true cannot compile",
        fixes=({"training.compile": "auto"}, _GATHER_WHOLE),
    ),
)

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
