"""Peak memory of a step against the planner's accounting, and against state plus measured activations.

    python benchmarks/memory_accounting.py examples/mpt-1b.yaml --out memory.json [section.field=value ...]

Accounted: what `phalanx plan` says of this run on one device, all of it counted from the run file and the traced model.
State: parameters, working copy, gradients and optimizer state alone (`layout.memory`). Activations, measured on one
micro-batch by itself: what its forward pass leaves allocated, and the most that its forward and backward pass together hold
beyond gradients that exist already. Found: the allocator's peak over whole steps of two micro-batches with the optimizer,
and how far what stays allocated grows over `--steps` steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from phalanx.config.load import load_run
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.trace.traced_model import TracedModel
from phalanx.training.step import build_step
from state_bytes import state_bytes

GIB = 2**30


def main() -> None:
    """Measure one run file and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_intermixed_args()
    run = load_run(options.run_file, options.overrides)
    layout = resolve_layout(bind(run), 1)
    device = torch.device("cuda", 0)
    planned = memory(bind(run, TracedModel), layout.table, Kernels.on_accelerators(bind(run, TracedModel))).allocated[0]
    attention = bind(run, LayoutModel).choose_attention(layout, device)
    applied = apply_layout(bind(run, LayoutModel), layout, ONE_RANK, device, attention)
    step = build_step(bind(run), applied, device)

    def batch(samples: int) -> TokenBatch:
        tokens = torch.randint(0, run.model.vocab_size, (samples, run.data.sequence_length + 1))
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], None, torch.arange(samples))

    with attention.active(device):
        step.run(1, batch(2 * layout.microbatch))
        parts = [batch(layout.microbatch).to(device) for _ in range(2)]
        for part in parts:
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            loss = applied.stages[0](part.tokens, part.sample_indices, targets_BS=part.targets)
            forward = torch.cuda.memory_allocated() - start
            loss.sum().backward()
            # The second pass adds to the gradients of the first.
            highest = torch.cuda.max_memory_allocated() - start
            del loss
        del parts, part
        torch.cuda.reset_peak_memory_stats()
        kept = []
        for number in range(2, 2 + options.steps):
            step.run(number, batch(2 * layout.microbatch))
            kept.append(torch.cuda.memory_allocated())
    accounted = state_bytes(bind(run), layout)
    found = torch.cuda.max_memory_allocated()
    result = {
        "run_file": str(options.run_file),
        "overrides": options.overrides,
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "accounted_peak_gib": planned / GIB,
        "found_over_accounted": found / planned,
        "state_gib": accounted.total / GIB,
        "measured_kept_by_forward_gib": forward / GIB,
        "measured_activations_gib": highest / GIB,
        "state_and_activations_gib": (accounted.total + highest) / GIB,
        "found_peak_gib": found / GIB,
        "found_over_state_and_kept_by_forward": found / (accounted.total + forward),
        "found_over_state_and_activations": found / (accounted.total + highest),
        "accounted_between_steps_gib": accounted.between_steps / GIB,
        "found_between_steps_gib": kept[-1] / GIB,
        "growth_over_steps_bytes": kept[-1] - kept[0],
        "steps": options.steps,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
