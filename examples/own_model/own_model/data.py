"""Chirps: waves whose frequency grows, each a function of its number alone."""

import math

import numpy as np
import torch
from torch import Tensor

from phalanx.counter_random import stream_key, uniform_values
from phalanx.data.sources import DataSource, Split
from phalanx.families.blocks.config import SourceData


class Chirps(DataSource):
    """As many waves as `data.options.items` says, and a tenth as many held-out ones."""

    def __init__(self, data: SourceData) -> None:
        self.items, self.length = int(data.options.get("items", 1000)), data.sequence_length

    def count_items(self, split: Split) -> int:
        """All of them, or a tenth as many."""
        return self.items if split == "train" else self.items // 10

    def read_items(self, split: Split, seed: int, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """[n, S, 1] twice: the wave, and the same one position on."""
        numbers = torch.from_numpy(np.asarray(items))[:, None] * 3 + torch.arange(3)
        phase, slow, fast = uniform_values(stream_key("chirp", split, seed), numbers).unbind(1)
        time = torch.linspace(0, 1, self.length + 1, dtype=torch.float64)
        wave = torch.sin(2 * math.pi * (phase[:, None] + (2 + 6 * slow[:, None]) * time + 8 * fast[:, None] * time**2))
        return wave[:, :-1, None].float(), wave[:, 1:, None].float()
