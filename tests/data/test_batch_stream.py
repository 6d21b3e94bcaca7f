"""Reading ahead: the same batches as without, failures told at every call, and no thread left behind."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from phalanx.data.batch_stream import ReadAheadStream
from phalanx.data.sample_order import Int64Array
from phalanx.errors import DataError
from phalanx.families.weather.data.field_samples import FieldBatch


class Counting:
    """Samples that are their numbers; from sample `bad` on reading fails."""

    fingerprint = "counting"

    def __init__(self, bad: int = 10**12) -> None:
        self.bad = bad
        self.read_numbers: list[int] = []

    def read(self, numbers: Int64Array) -> FieldBatch:
        self.read_numbers += numbers.tolist()
        if numbers[-1] >= self.bad:
            raise DataError(f"sample {self.bad} is bad")
        values = torch.from_numpy(numbers.astype(np.float32))
        fields = values[:, None, None, None]
        return FieldBatch(fields, fields, fields, values, values, values, torch.from_numpy(numbers))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_follow_each_other_from_any_step(prefetch: int) -> None:
    stream = ReadAheadStream(Counting(), global_batch=6, rank=1, ranks=3, prefetch=prefetch)
    assert [stream.next().sample_indices.tolist() for _ in range(3)] == [[2, 3], [8, 9], [14, 15]]
    stream.seek(10**9)
    assert stream.next().sample_indices.tolist() == [6 * 10**9 + 2, 6 * 10**9 + 3]
    stream.seek(0)
    assert stream.next().sample_indices.tolist() == [2, 3]
    assert stream.batch(2).sample_indices.tolist() == [8, 9]
    stream.close()


def test_no_more_is_read_ahead_than_asked() -> None:
    reader = Counting()
    stream = ReadAheadStream(reader, global_batch=2, prefetch=2)
    stream.next()
    stream.close()
    # One taken, two kept, one in hand; closing makes room for a last few.
    assert len(reader.read_numbers) <= 2 * 7


def test_what_reading_raised_is_raised_when_its_batch_is_due_and_ever_after() -> None:
    stream = ReadAheadStream(Counting(bad=5), global_batch=2, prefetch=3)
    assert stream.next().sample_indices.tolist() == [0, 1]
    assert stream.next().sample_indices.tolist() == [2, 3]
    for _ in range(2):
        with pytest.raises(DataError, match="sample 5 is bad"):
            stream.next()
    stream.seek(0)
    assert stream.next().sample_indices.tolist() == [0, 1]
    stream.close()


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    stream = ReadAheadStream(Counting(), global_batch=2)
    stream.next()
    assert threading.active_count() == before + 1
    stream.close()
    stream.close()
    assert threading.active_count() == before


def test_the_fingerprint_tells_the_size_of_a_batch() -> None:
    assert ReadAheadStream(Counting(), global_batch=2).fingerprint == "counting/2"
