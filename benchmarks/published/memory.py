"""What published runs of other frameworks would hold: our model of the same layout, and what those frameworks keep besides.

Only for comparing with published figures. Parameters, gradients and optimizer state need no switch: with ZeRO 1 ours take
6 + 12 / d bytes a parameter, as Megatron's distributed optimizer does, and 18 without sharding, as Megatron does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.measured.check_predictions import run_of
from phalanx.planner.memory.model import Kernels, rank_memory
from phalanx.planner.memory.parts import model_bytes
from phalanx.planner.trace.traced_model import Kernel, TracedModel
from published.in_flight import blocks_in_flight
from published.runs import PublishedRun


@dataclass(frozen=True)
class Habits:
    """What a framework does otherwise than we do."""

    attention: Kernel = "flash"
    compiled: bool = False
    whole_logits: int = 10
    """Bytes for each logit of a micro-batch: 2 in bfloat16, 4 in float32 and 4 of its gradient. 0 where the loss runs over
    chunks."""
    split_between_blocks: bool = True
    """Whether tensor-parallel ranks keep different parts of the activations between blocks, where a row does not say."""


HABITS = {
    "torchtitan": Habits(compiled=True),
    "nanotron": Habits(),
    "Phalanx": Habits(compiled=True, whole_logits=0),
    "Megatron-DeepSpeed": Habits(attention="math", split_between_blocks=False),
}
"""By the first word of the framework's name."""


def published_peak(published: PublishedRun) -> float | None:
    """Modelled bytes of live tensors on the worst rank of a published run; None where too little is known of it."""
    run, layout = run_of(published), published.layout
    habits = HABITS.get(published.framework.partition(" ")[0])
    if run is None or layout is None or habits is None:
        return None
    kernels = Kernels(habits.attention, habits.compiled)
    ranks = rank_memory(bind(run, TracedModel), layout, run.layout.recompute, kernels)
    besides = _besides(run, layout, published.sequence_parallel, habits, kernels)
    return max(rank.allocated + more for rank, more in zip(ranks, besides, strict=True))


def _besides(
    run: LanguageRun, layout: ResolvedLayout, split: bool | None, habits: Habits, kernels: Kernels
) -> list[float]:
    """Bytes that each pipeline rank holds besides."""
    one = replace(layout, recompute=run.layout.recompute).table
    parts = model_bytes(bind(run, TracedModel), one, attention=kernels.attention, compiled=kernels.compiled)
    costs = bind(run).block_costs()
    blocks_kept = blocks_in_flight(layout, run.model.n_layers, costs)
    split = habits.split_between_blocks if split is None else split
    # Each rank has the whole of what stands between blocks, where ours has its part.
    whole = 0.0 if split else (layout.tp - 1) * float(parts.hidden[0])
    tokens = layout.microbatch * run.data.sequence_length // layout.cp
    logits = habits.whole_logits * tokens * run.model.vocab_size / layout.tp
    besides = blocks_kept * whole
    # The last pipeline rank computes the loss.
    besides[-1] += logits
    return [float(more) for more in besides]
