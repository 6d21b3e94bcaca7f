"""Chirps: waves whose frequency grows, each a function of its number alone."""

import math

import numpy as np
import torch
from torch import Tensor

from phalanx import DataSource
from phalanx.counter_random import stream_key, uniform_values


class Chirps(DataSource):
    """As many waves as `data.options.items` says, and a tenth as many held-out ones."""

    def __init__(self, sequence_length: int, items: int = 1000) -> None:
        super().__init__(sequence_length)
        self.items = items

    def count_items(self, split: str) -> int:
        """All of them, or a tenth as many."""
        return self.items if split == "train" else self.items // 10

    def read_items(self, split: str, seed: int, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """[n, S, 1] twice: the wave, and the same one position on."""
        numbers = torch.from_numpy(items)[:, None] * 3 + torch.arange(3)
        phase, slow, fast = uniform_values(stream_key("chirp", split, seed), numbers)[..., None].unbind(1)
        time = torch.linspace(0, 1, self.sequence_length + 1, dtype=torch.float64)
        wave = torch.sin(2 * math.pi * (phase + (2 + 6 * slow) * time + 8 * fast * time**2)).float()
        return wave[:, :-1, None], wave[:, 1:, None]
