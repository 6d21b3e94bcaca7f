"""Batches of steps that went wrong, kept by the numbers of their samples in `bad_batches/` of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from phalanx.checkpoint import RankGroup
from phalanx.files import write_atomically

FOLDER = "bad_batches"


def keep_bad_batch(
    run_dir: Path, name: str, step: int, reason: str, samples: Tensor, figures: Mapping[str, object]
) -> str | None:
    """Write which samples a step read, of all ranks together; return a warning where that fails. Every rank calls it.

    name: of the file. samples: global sample numbers of this rank's batch, int64 [B]; what a sample holds is a function of
    its number. figures: what the step came to, as JSON has it.
    """
    ranks = RankGroup.default()
    shares = ranks.gather(samples.tolist())

    def write() -> str | None:
        # Ranks over which positions or layers are split read the same samples.
        numbers = sorted({number for share in shares for number in share})
        record = {"step": step, "reason": reason, **figures, "samples": numbers}
        folder = run_dir / FOLDER
        try:
            folder.mkdir(exist_ok=True)
            write_atomically(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
        except OSError as error:
            return f"{folder} cannot be written ({error.strerror}): the samples of step {step} are not kept"
        return None

    return ranks.on_first(write)
