"""Data sources of one's own: order, shares, what counts as a target, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.data.sources import (
    DATA_SOURCES,
    DataSource,
    SampleStream,
    SourceReader,
    TensorSpec,
    count_targets,
    open_source,
)
from phalanx.errors import ConfigError, DataError

SPECS = TensorSpec((2,)), TensorSpec((), torch.int64, 5)


class Numbers(DataSource):
    """Items that hold their own number."""

    def __init__(self, sequence_length: int, items: int = 6) -> None:
        super().__init__(sequence_length)
        self.items = items

    def count_items(self, split: str) -> int:
        return self.items if split == "train" else 0

    def read_items(self, split: str, seed: int, items: np.ndarray) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(items)
        inputs = numbers[:, None, None].expand(-1, self.sequence_length, 2).float()
        return inputs.clone(), numbers[:, None].expand(-1, self.sequence_length).clone() % 5


def reader(seed: int = 3, positions: int = 4) -> SourceReader:
    return SourceReader(Numbers(4), seed, positions, SPECS)


def test_every_item_is_read_once_an_epoch_in_an_order_of_the_seed() -> None:
    orders = []
    for seed in (3, 4):
        batch = reader(seed).read(np.arange(18))
        epochs = batch.samples[:, 0, 0].view(3, 6).long().tolist()
        assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
        assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
        orders.append(epochs)
    assert orders[0] != orders[1]


def test_ranks_share_the_samples_of_a_step_and_a_stream_resumes_anywhere() -> None:
    whole = SampleStream(reader(), global_batch=4, prefetch=0)
    shares = [SampleStream(reader(), global_batch=4, rank=rank, ranks=2, prefetch=1) for rank in range(2)]
    for share in shares:
        share.seek(2)
    whole.seek(2)
    for _ in range(3):
        expected, parts = whole.next(), [share.next() for share in shares]
        assert torch.equal(expected.samples, torch.cat([part.samples for part in parts]))
        assert torch.equal(expected.sample_indices, torch.cat([part.sample_indices for part in parts]))
    for share in shares:
        share.close()


def test_targets_that_count() -> None:
    assert count_targets(torch.tensor([[1.0, torch.nan, 0.0]])).tolist() == [2]
    assert count_targets(torch.tensor([[1, -1, 0, -100]])).tolist() == [2]


def test_tensors_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(DataError, match=r"Numbers gives inputs of shape \[2, 4, 2\].*takes \[2, 5, 2\]"):
        reader(positions=5).read(np.arange(2))


def test_fingerprints_tell_sources_seeds_and_lengths_apart() -> None:
    prints = {reader(seed).fingerprint for seed in (3, 4)} | {SourceReader(Numbers(4, 7), 3, 4, SPECS).fingerprint}
    assert len(prints) == 3 and reader().fingerprint == reader().fingerprint


def test_random_samples_are_a_function_of_their_numbers() -> None:
    for spec in SPECS:
        numbers = torch.tensor([9, 2, 5])
        many, one = spec.random_samples("x", numbers, 4), spec.random_samples("x", numbers[1:2], 4)
        assert many.shape == (3, 4, *spec.shape) and many.dtype == spec.dtype
        assert torch.equal(many[1:2], one) and not torch.equal(many[0], many[1])
    assert set(SPECS[1].random_samples("x", torch.arange(40), 4).unique().tolist()) == set(range(5))


def test_options_go_to_the_source_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATA_SOURCES._items, "numbers", Numbers)
    assert open_source("numbers", 4, {"items": 9}).describe() == "9 samples"
    with pytest.raises(ConfigError, match=r"data\.options=.*colour.*numbers cannot be opened"):
        open_source("numbers", 4, {"colour": 1})
    with pytest.raises(ConfigError, match="did you mean numbers"):
        open_source("number", 4, {})
