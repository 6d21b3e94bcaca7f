"""What ranks hold, in bytes: the counts of `one_stage` and `pipelined` times what one of each takes, by cause."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phalanx.planner.memory.replay import COLUMN, COUNTS, PeakCandidates
from phalanx.planner.memory.state import Allocations, Amount, Exchanges
from phalanx.planner.schedule.schedule_table import IntArray

FloatArray = npt.NDArray[np.float64]


def weights(exchanges: Exchanges, later: Amount) -> dict[str, Allocations]:
    """Return the bytes of one of each of `COUNTS`, by cause; arrays with one entry for each layout.

    later: micro-batches of a step beyond those of the table that is replayed.
    """
    r, s, z = exchanges, exchanges.s, exchanges.s.sizes
    state = {
        "layers": r.state_of(z.block.plus(z.experts)),
        "leading": r.state_of(z.leading),
        "embedding": r.state_of(z.embedding),
        "head": r.state_of(z.head),
    }
    activations = {
        "blocks_kept": z.block.kept - z.leaving,
        "leading_kept": z.leading.kept - z.leading_leaving,
        "blocks_present": z.leaving,
        "leading_present": z.leading_leaving,
        "received_present": -z.input_leaving,
        "embeddings_kept": z.embedding.kept,
        "heads_kept": z.head.kept,
        "stages_kept": z.shared,
        "waiting": z.waiting,
        "handed_on": z.hidden,
        "results": z.hidden,
    }
    messages = {
        "messages": z.hidden,
        "sent_lately": z.hidden * (not s.sends_last),
        "sent": z.hidden * s.sends_last,
        "later_sent": z.hidden * later * s.sends_last,
    }
    # A direction in the format of the arithmetic, which is the gradient itself where that has it already, and an update.
    each = s.width * (2 if s.width < s.master else 1) * (s.round_bytes > 0)
    updates = {
        "updated_blocks": each * (z.block.matrices + z.experts.matrices),
        "updated_leading": each * z.leading.matrices,
        "updates": s.round_bytes,
    }
    moved = {
        "updated_blocks": z.block.trained_shard + z.experts.trained_shard,
        "updated_leading": z.leading.trained_shard,
        "updated_embedding": z.embedding.trained_shard,
        "updated_head": z.head.trained_shard,
    }
    found = state | _gradients(r) | _gathered(r) | _passes(r)
    for cause, sizes in (
        ("activations", activations),
        ("pipeline buffers", messages),
        ("whole matrices", updates),
    ):
        found |= {name: {cause: size} for name, size in sizes.items()}
    for name, elements in moved.items():
        found[name] = {**found.get(name, {}), "optimizer moments": s.master * s.moved_values * elements}
    # A block that keeps its input keeps no copy of what was received.
    found["received"] = {"activations": z.input_leaving - z.block_input, "pipeline buffers": z.hidden}
    assert found.keys() == set(COUNTS)
    return found


def together(weight: dict[str, Allocations]) -> FloatArray:
    """Return the bytes of one of each count, all causes together, [COUNTS, layouts]."""
    return np.stack(np.broadcast_arrays(*(sum(weight[name].values()) for name in COUNTS)))


def buffers_beside(exchanges: Exchanges) -> FloatArray:
    """Return the bytes of one of each of `COUNTS` in the buffers through which shards are exchanged, [COUNTS, layouts].

    Alignment is not counted; see `peer_buffers`.
    """
    s, z = exchanges.s, exchanges.s.sizes
    found = np.zeros((len(COUNTS), len(z.shards)))
    parts = {"layers": z.block, "leading": z.leading, "embedding": z.embedding, "head": z.head}
    if s.peer_copies:
        sent = np.where(exchanges.whole, s.master, s.width)
        for name, part in parts.items():
            pool = 0 if name in ("layers", "leading") else sent * part.trained_gathered
            found[COLUMN[name]] = exchanges.sharded_many * (exchanges.published_bytes(part) + pool)
    return found


def heaviest(each: PeakCandidates, one: FloatArray, besides: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return the bytes of the largest row and which one it is, of every layout.

    Rows are compared with `besides`, which is left out of the result.

    one, besides: bytes of one of each count, [COUNTS, layouts].
    """
    row = (each.counts @ (one + besides)).argmax(axis=0)
    return np.einsum("lc,cl->l", each.counts[row], one), row


def causes_of(counts: FloatArray, weight: dict[str, Allocations], constant: Allocations) -> Allocations:
    """Return bytes by cause. counts: a row of `PeakCandidates.counts`. constant: what is held besides."""
    held = dict(constant)
    for name, count in zip(COUNTS, counts.tolist(), strict=True):
        for cause, one in weight[name].items():
            held[cause] = held.get(cause, 0) + count * one
    return held


def _gradients(r: Exchanges) -> dict[str, Allocations]:
    s, z = r.s, r.s.sizes
    found: dict[str, Allocations] = {
        "pending": {"gradients": z.block.pending},
        "summed_embedding": {"reduce buffers": s.sharded * s.master * z.embedding.trained_shard},
        "tied_gradient": {"one part's pass": s.width * z.embedding.trained_count},
        "streamed_gradients": {"gradients": s.master * z.block.streamed},
    }
    for name, part in (("blocks", z.block), ("embedding", z.embedding), ("head", z.head)):
        whole = np.where(r.whole, part.trained_gathered + part.streamed, part.trained_shard)
        found[f"whole_{name}"] = {"gradients": s.master * whole}
        found[f"shared_{name}"] = {"gradients": s.master * part.trained_shard}
        found[f"sent_{name}"] = {"reduce buffers": s.sharded * r.sent * part.trained_gathered}
        found[f"own_{name}"] = {"one part's pass": r.own_gradients(part)}
    first = z.leading
    found["whole_leading"] = {"gradients": s.master * np.where(r.whole, first.trained_gathered, first.trained_shard)}
    found["shared_leading"] = {"gradients": s.master * first.trained_shard}
    # Experts that one rank alone has are never gathered: their gradients are theirs.
    experts = np.where(r.whole & r.spread, z.experts.trained_gathered, z.experts.trained_shard)
    for name, more in (("whole_blocks", experts), ("shared_blocks", z.experts.trained_shard)):
        found[name]["gradients"] = found[name]["gradients"] + s.master * more
    return found


def _gathered(r: Exchanges) -> dict[str, Allocations]:
    s, z = r.s, r.s.sizes
    found: dict[str, Allocations] = {}
    for name, part in (("blocks", z.block), ("embedding", z.embedding), ("head", z.head)):
        gathered = r.gathered_bytes(part)
        found[f"gathered_{name}"] = {"gathered parameters": s.sharded * gathered}
        found[f"arrived_{name}"] = {"gather buffers": s.sharded * r.received * gathered}
        found[f"arriving_{name}"] = {"gather buffers": s.sharded * r.arriving * gathered}
    block = r.gathered_bytes(z.block)
    experts = r.spread * s.width * z.experts.gathered
    found["gathered_blocks"] = {"gathered parameters": s.sharded * (block + experts)}
    # The buffer of one arrival goes at the next: that of the experts, inside their block, is the later one.
    later = np.where(r.spread, r.experts_arrived * z.experts.gathered, r.received * block)
    found["arrived_blocks"] = {"gather buffers": s.sharded * later}
    found["gathered_leading"] = {"gathered parameters": s.sharded * r.gathered_bytes(z.leading)}
    return found


def _passes(r: Exchanges) -> dict[str, Allocations]:
    """Return the counts of one part that computes, or whose gradients are reduced."""
    z, found = r.s.sizes, {}
    for name, part in (("embedding", z.embedding), ("block", z.block), ("head", z.head), ("leading", z.leading)):
        found[f"{name}_forward"] = {"one part's pass": part.forward}
        found[f"{name}_backward"] = {"one part's pass": part.backward}
    # Where nobody else casts it, the head casts its matrix for every micro-batch.
    cast = ~r.s.sharded * (r.s.width * z.head.count if r.s.width < r.s.master and not r.s.copies else 0)
    for name in ("head_forward", "head_backward"):
        found[name]["one part's pass"] = found[name]["one part's pass"] + cast
    for name, part in (("embedding", z.embedding), ("blocks", z.block), ("head", z.head)):
        found[f"{name}_reduced"] = {"reduce buffers": r.reducing(part)}
        # Where nothing is sharded, the gradients are gone by the time their copy is divided.
        gone = part.trained_gathered * (r.whole & (z.shards == 1))
        found[f"{name}_given_up"] = {"gradients": -r.s.master * gone}
    # A forward pass keeps the buffer in which experts arrived, also where it is repeated; a backward pass does not.
    arrived = r.dropped * r.experts_arrived * z.experts.gathered * (z.beside_experts > 0)
    backward: Amount = np.maximum(z.block.backward, z.beside_experts + arrived)
    now, later = r.experts_reduced()
    found["experts_reduced"] = {}
    if np.any(now):
        # Experts are done before the rest of their block, whose backward pass goes on beside what they are sent from. In a
        # pipeline all is reduced together, behind the last pass.
        freed = r.s.width * z.experts.trained_gathered * (~r.several | (r.s.zero != 2))
        # As for other parts: where nothing is sharded, gradients added up before are gone when their copy is divided.
        freed = freed + r.s.master * z.experts.trained_gathered * (r.whole & (z.expert_shards == 1))
        behind = np.maximum(z.experts.forward + now, z.experts.backward + later) - freed
        found["experts_reduced"] = {"one part's pass": np.where(r.s.piped, 0, behind)}
        reduced = r.reducing(z.block)
        whole: Amount = np.where(r.s.piped, np.maximum(reduced, now), reduced)
        found["blocks_reduced"] = {"reduce buffers": whole}
    found["block_backward"] = {"one part's pass": backward}
    return found
