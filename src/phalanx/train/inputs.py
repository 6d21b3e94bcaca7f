"""What a run reads: the training stream of this rank, the held-out samples and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from phalanx.config.schema import Run
from phalanx.data.language.batches import TokenBatchStream
from phalanx.data.language.sources import TokenSource, open_source
from phalanx.layout.mesh import Ranks
from phalanx.layout.spec import ResolvedLayout
from phalanx.train.evaluator import Evaluator


@dataclass(frozen=True)
class Inputs:
    """Opened data of a run."""

    stream: TokenBatchStream
    evaluator: Evaluator


def open_inputs(run: Run, layout: ResolvedLayout, ranks: Ranks, device: torch.device) -> Inputs:
    """Open every source of the run file. Raises DataError for missing, truncated or unsuitable data."""
    raise NotImplementedError
