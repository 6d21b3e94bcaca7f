"""Batches of steps that went wrong, kept by the numbers of their samples in `bad_batches/` of the run directory."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint import RankGroup
from phalanx.files import write_atomically
from phalanx.training.metrics import StepMetrics

FOLDER = "bad_batches"


def keep_bad_batch(run_dir: Path, metrics: StepMetrics, reason: str, samples: Tensor) -> str | None:
    """Write which samples a step read, of all ranks together; return a warning where that fails. Every rank calls it.

    samples: global sample numbers of this rank's batch, int64 [B]. What a sample holds is a function of its number.
    """
    ranks = RankGroup.default()
    shares = ranks.gather(samples.tolist())

    def write() -> str | None:
        record = {
            "step": metrics.step,
            "reason": reason,
            # As text: JSON has no NaN.
            "loss": str(metrics.loss),
            "grad_norm": str(metrics.grad_norm),
            "lr": metrics.lr,
            # Ranks over which positions or layers are split read the same samples.
            "samples": sorted({number for share in shares for number in share}),
        }
        folder = run_dir / FOLDER
        try:
            folder.mkdir(exist_ok=True)
            write_atomically(folder / f"step-{metrics.step:08d}.json", json.dumps(record, indent=1) + "\n")
        except OSError as error:
            return f"{folder} cannot be written ({error.strerror}): the samples of step {metrics.step} are not kept"
        return None

    return ranks.on_first(write)
