"""Chirps to train on, each a function of its number alone; and a callback that writes how the loss falls."""

import json
import math

import numpy as np
import torch
from torch import Tensor

from phalanx import Callback, DataSource
from phalanx.counter_random import stream_key, uniform_values


class Chirps(DataSource):
    def __init__(self, sequence_length: int, items: int = 1000) -> None:
        super().__init__(sequence_length)
        self.items = items

    def count_items(self, split: str) -> int:
        return self.items if split == "train" else self.items // 10

    def read_items(self, split: str, seed: int, items: np.ndarray) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(items)[:, None] * 3 + torch.arange(3)
        phase, slow, fast = uniform_values(stream_key("chirp", split, seed), numbers)[..., None].unbind(1)
        time = torch.linspace(0, 1, self.sequence_length + 1, dtype=torch.float64)
        wave = torch.sin(2 * math.pi * (phase + (2 + 6 * slow) * time + 8 * fast * time**2)).float()
        return wave[:, :-1, None], wave[:, 1:, None]


class LossGap(Callback):
    def on_start(self, context) -> None:
        self.file, self.before = context.run_dir / "gaps.jsonl" if context.rank == 0 else None, None

    def on_step_end(self, metrics) -> None:
        if self.file is not None and self.before is not None:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": metrics.step, "gap": self.before - metrics.loss}) + "\n")
        self.before = metrics.loss
