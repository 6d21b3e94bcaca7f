"""What a run of blocks reads: samples of a data source, and the loss of held-out ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from phalanx.data.sources import SourceReader
from phalanx.layout.execute import Executor
from phalanx.training.inputs import Finding


def evaluation_fields(loss: float, samples: int) -> dict[str, float]:
    """Return what an evaluation writes down: the mean loss a target, and over how many samples."""
    return {"loss": loss, "samples": samples}


@dataclass(frozen=True)
class HeldOutEvaluator:
    """Computes the loss of the same held-out items again and again."""

    reader: SourceReader
    samples: int
    """Items that an evaluation reads at most."""
    device: torch.device

    def evaluate(self, executor: Executor) -> list[Finding]:
        """The mean loss a target over items spread evenly over the validation split; every rank calls it."""
        held_out = self.reader.source.count_items("validation")
        if not held_out:
            return []
        items = np.unique(np.linspace(0, held_out - 1, min(self.samples, held_out)).round().astype(np.int64))
        layout, mesh = executor.layout, executor.mesh
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        size = layout.microbatch
        for start in range(0, len(items), size * layout.data_ranks):
            # A sharded model needs all ranks, a pipeline micro-batches of one size: what is missing repeats the last item.
            places = np.arange(size) + start + mesh.data_rank * size
            batch = self.reader.read_items("validation", items[np.minimum(places, len(items) - 1)], places)
            targets = batch.targets.clone()
            targets[torch.from_numpy(places >= len(items))] = torch.nan if targets.dtype.is_floating_point else -1
            batch = type(batch)(batch.samples, targets, batch.sample_indices).to(self.device)
            count = batch.target_counts().double() if mesh.reads_first else torch.zeros(1, device=self.device)
            sums += torch.cat((executor.evaluate(batch), count))
        if mesh.world is not None:
            dist.all_reduce(sums, group=mesh.world)
        loss = float(sums[0] / sums[1].clamp(min=1))
        return [Finding("evaluation", evaluation_fields(loss, len(items)), f"held-out loss {loss:.5g}")]
