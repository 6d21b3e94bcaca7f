"""Peak memory of a step against the run file's accounting plus measured activations.

    python benchmarks/memory_accounting.py examples/mpt-1b.yaml --out memory.json [section.field=value ...]

Accounted: parameters, working copy, gradients and optimizer state (`layout.memory`). Measured: what one forward pass leaves
allocated (activations, and the head's gradient), before any gradient exists. Predicted peak: their sum. Found: the
allocator's peak over whole steps of two micro-batches, and how far what stays allocated grows over `--steps` steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

from phalanx.config.load import load_run
from phalanx.data.language.batches import TokenBatch
from phalanx.layout.apply import apply_layout
from phalanx.layout.attention import AttentionShape, choose_attention
from phalanx.layout.memory import state_bytes
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.precision import PRECISIONS
from phalanx.layout.resolve import resolve_layout
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import TrainStep

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
    layout = resolve_layout(run, 1)
    device = torch.device("cuda", 0)
    memory = torch.cuda
    shape = AttentionShape(layout.microbatch, run.data.sequence_length, PRECISIONS[run.layout.precision], False)
    attention = choose_attention(run.training.attention, run.model, shape, device)
    applied = apply_layout(run, layout, ONE_RANK, device, attention)
    optimizer = build_optimizer(applied.parameters, run.optimizer)
    step = TrainStep(applied, optimizer, device=device, grad_clip=1.0)

    def batch(samples: int) -> TokenBatch:
        tokens = torch.randint(0, run.model.vocab_size, (samples, run.data.sequence_length + 1))
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], None, torch.arange(samples))

    with attention.active():
        step.run(1, batch(2 * layout.microbatch))
        part = batch(layout.microbatch).to(device)
        before = memory.memory_allocated()
        loss = applied.stages[0](part.tokens, part.targets, part.sample_indices)
        activations = memory.memory_allocated() - before
        del loss, part
        memory.reset_peak_memory_stats()
        kept = []
        for number in range(2, 2 + options.steps):
            step.run(number, batch(2 * layout.microbatch))
            kept.append(memory.memory_allocated())
    accounted = state_bytes(run, layout)
    predicted, found = accounted.total + activations, memory.max_memory_allocated()
    result = {
        "run_file": str(options.run_file),
        "overrides": options.overrides,
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "accounted_state_gib": accounted.total / GIB,
        "measured_activations_gib": activations / GIB,
        "predicted_peak_gib": predicted / GIB,
        "found_peak_gib": found / GIB,
        "found_over_predicted": found / predicted,
        "accounted_between_steps_gib": accounted.between_steps / GIB,
        "found_between_steps_gib": kept[-1] / GIB,
        "growth_over_steps_bytes": kept[-1] - kept[0],
        "steps": options.steps,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
