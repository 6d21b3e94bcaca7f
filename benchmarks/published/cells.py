"""Cells of a table of published runs: the words that sources use for what they did.

Where a source gives no single figure, cells hold a few words; such a row cannot be used.
"""

from __future__ import annotations

import re

from phalanx.layout.spec import Recompute
from phalanx.planner.measured.cells import Row, Unusable

COLUMNS = (
    *("row_id", "tag", "confidence", "group", "system", "framework", "status", "notes", "source"),
    *("gpu", "gpu_unit", "n_gpus", "gpus_per_node"),
    *("model", "family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"),
    *("tp", "pp", "vpp", "dp", "cp", "ep", "sp", "zero_stage", "sharding", "mbs", "gbs", "grad_accum"),
    *("precision", "recompute", "attention"),
    *("tokens_per_s_per_gpu", "step_time_s", "samples_per_s", "tflops_per_gpu", "flops_kind", "mfu_pct"),
    *("mem_per_gpu", "mem_unit", "mem_kind"),
)
"""Columns that are read; the header holds them in any order, with others beside them."""
_PRIMUS = "amd-primus"
"""Rows of which example run files say what the table leaves out: AMD-AGI/Primus, examples/megatron/configs/MI355X. They
recompute no layer (`recompute_num_layers: 0`) and gather parameters while they compute (`overlap_param_gather`), as
Megatron's distributed optimizer alone does."""


def devices_per_node(row: Row, per_unit: int) -> int | None:
    """Devices that share a node (for NVL72 racks, the link domain), None where not stated."""
    domain = re.fullmatch(r"NVL(\d+)", row.text("gpus_per_node"))
    count = int(domain[1]) if domain else row.whole("gpus_per_node")
    return None if count is None else count * per_unit


def recompute_of(row: Row) -> Recompute:
    """What is computed again in the backward pass. Raises Unusable where that is not stated or nothing our layouts do."""
    stated = row.text("recompute").lower()
    if not stated and row.text("group") == "megatron-bridge":
        # Recipes beside the table (src/megatron/bridge/perf_recipes) recompute norms, the experts' activation function or
        # the up-projection of latent attention, or nothing: a few passes over memory.
        row.assumed.append("no recomputation")
        return "none"
    if not stated and row.text("group") == _PRIMUS:
        row.assumed.append("no recomputation")
        return "none"
    if not stated:
        raise Unusable("the source does not state whether activations are recomputed")
    if "selective layer" in stated:
        raise Unusable("it recomputes whole blocks, but only every second one")
    if stated.startswith(("full", "activation checkpointing")):
        return "full"
    if "selective" in stated:
        return "selective"
    if "none" in stated or "no recompute" in stated:
        if "assumed" in stated:
            row.assumed.append("no recomputation")
        return "none"
    raise Unusable(f"what it recomputes ('{row.text('recompute')}') is not something our layouts do")


def zero_of(row: Row) -> int:
    """What data-parallel ranks share out: the stated stage, else what the words for sharding mean, else nothing."""
    stated = row.text("zero_stage")
    if stated in ("0", "1", "2", "3"):
        return int(stated)
    words = row.text("sharding").lower()
    row.assumed.append("ZeRO stage")
    if not words and row.text("group") == _PRIMUS:
        return 1
    if "shard_grad_op" in words:
        return 2
    if "fsdp" in words or "hsdp" in words:
        return 3
    return 1 if "distributed optimizer" in words or "distopt" in words else 0


def memory_gib(row: Row, per_unit: int) -> tuple[float, str] | None:
    """What one device held, in units of 2^30 bytes, and what was measured; None where nothing of the sort was.

    "GB" is taken as 2^30 bytes, which is what PyTorch and the vendors' tools mean by it. Totals of a model and figures that
    sources calculated are none.
    """
    value, unit = row.number("mem_per_gpu"), row.text("mem_unit")
    kind = row.text("mem_kind")
    if value is None or unit not in ("GB", "GiB") or "analytic" in row.text("notes").lower():
        return None
    if re.search(r"relative|total|params|activations", kind):
        return None
    return value / per_unit, kind or "not stated"
