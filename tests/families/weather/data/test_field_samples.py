"""Samples: right values at the right times, the same whoever reads them, every window once an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from field_files import dataset, field, field_data, write_climax, write_year
from phalanx.errors import DataError
from phalanx.families.weather.config import FieldSource
from phalanx.families.weather.data.field_samples import FieldBatch, FieldBatchStream, FieldReader
from phalanx.families.weather.data.open_fields import FieldSet
from phalanx.families.weather.data.prepare_fields import prepare_fields

HOURS = np.arange(240) * 6


@pytest.fixture(scope="module")
def year(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fields") / "year"
    write_year(folder)
    return folder


def reader(*sources: Any, seed: int = 1, **changes: Any) -> FieldReader:
    return FieldSet(field_data(*sources, **changes)).reader("train", seed=seed)


def test_a_sample_is_the_field_at_its_time_and_the_one_its_lead_time_later(year: Path) -> None:
    found = reader(year, outputs=["t850"])
    numbers = np.arange(50, 90)
    cases, batch = found.locate(numbers), found.read(numbers)
    assert batch.fields.shape == (40, 4, 6, 8)
    for column, name in enumerate(("z500", "t850", "u10")):
        scale = found.statistics.variables[name]
        expected = (field(name, HOURS[cases.start]) - scale.mean) / scale.std
        np.testing.assert_allclose(batch.fields[:, column].numpy(), expected, atol=2e-5)
    scale = found.statistics.variables["t850"]
    later = HOURS[cases.start] + batch.lead_hours.numpy()
    np.testing.assert_allclose(batch.targets[:, 0].numpy(), (field("t850", later) - scale.mean) / scale.std, atol=2e-5)
    assert set(batch.lead_hours.tolist()) == {6.0, 12.0, 24.0}
    assert batch.fields[:, 3].std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(batch.time_of_day.numpy(), HOURS[cases.start] % 24 / 24, atol=1e-6)
    np.testing.assert_allclose(batch.time_of_year.numpy(), HOURS[cases.start] / 24 / 366, atol=1e-6)
    assert batch.sample_indices.tolist() == numbers.tolist()
    assert (batch.fields.dtype, batch.targets.dtype, batch.sample_indices.dtype) == (
        torch.float32,
        torch.float32,
        torch.int64,
    )


def test_normalising_and_back_again(year: Path) -> None:
    found = reader(year, outputs=["u10", "z500"])
    cases = found.locate(np.arange(5))
    truth = found.read_outputs(cases)
    batch = found.read(np.arange(5))
    moments = (found.statistics.mean_of(found.outputs), found.statistics.std_of(found.outputs))
    mean, std = (torch.tensor(values).float().view(-1, 1, 1) for values in moments)
    torch.testing.assert_close((truth - mean) / std, batch.targets, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.denormalise(batch.targets), truth, atol=0.02, rtol=1e-6)


def test_every_window_is_read_once_an_epoch_and_another_epoch_has_another_order(year: Path) -> None:
    found = reader(year)
    windows = len(found.sources[0].windows.starts)
    assert windows == 159
    first, second = (found.locate(np.arange(e * windows, (e + 1) * windows)).start for e in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(159))
    assert first.tolist() != second.tolist()
    assert first.tolist() != reader(year, seed=2).locate(np.arange(windows)).start.tolist()


def test_every_lead_time_is_drawn_equally_often_the_longest_too(year: Path) -> None:
    found = reader(year, lead_hours={"first": 6, "last": 48, "step": 6})
    numbers = np.arange(20000)
    cases = found.locate(numbers)
    inside = cases.start < 150
    counts = np.bincount((cases.target - cases.start)[inside], minlength=9)
    assert counts[0] == 0
    assert counts[1:].sum() == inside.sum()
    assert np.abs(counts[1:] / inside.sum() - 1 / 8).max() < 0.01
    # By number alone, so whoever reads it and in whatever company.
    assert found.locate(numbers[777:778]).target.tolist() == cases.target[777:778].tolist()


def test_no_window_leaves_its_split(year: Path) -> None:
    fields = FieldSet(field_data(year))
    for split, first, last in (("train", 0, 159), ("validation", 165, 199), ("test", 205, 239)):
        windows = fields.reader(split, seed=0).sources[0].windows
        used = windows.targets[windows.targets >= 0]
        assert windows.starts.min() == first
        assert windows.starts.max() == last - 1
        assert (used.min(), used.max()) == (first + 1, last)


@pytest.mark.parametrize(("gap", "first"), [(None, 163), (0, 160), (30, 164)])
def test_a_split_begins_a_gap_after_the_one_before(year: Path, gap: int | None, first: int) -> None:
    splits = {"train": {"first": "step 0", "last": "step 159"}, "validation": {"first": "step 160", "last": "step 239"}}
    windows = FieldSet(field_data(year, splits=splits, gap_hours=gap)).reader("validation", seed=0).sources[0].windows
    assert windows.starts[0] == first


@pytest.mark.parametrize("ranks", [2, 3, 12])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_global_batch_is_the_same_however_many_ranks_read_it(year: Path, ranks: int, prefetch: int) -> None:
    found = reader(year)
    whole = FieldBatchStream(found, global_batch=12, prefetch=0)
    whole.seek(40)
    expected = [whole.next() for _ in range(2)]
    streams = [FieldBatchStream(found, global_batch=12, rank=r, ranks=ranks, prefetch=prefetch) for r in range(ranks)]
    for stream in streams:
        stream.next()
        stream.seek(40)
    for batch in expected:
        parts = [stream.next() for stream in streams]
        assert torch.cat([part.fields for part in parts]).equal(batch.fields)
        assert torch.cat([part.targets for part in parts]).equal(batch.targets)
        assert torch.cat([part.sample_indices for part in parts]).equal(batch.sample_indices)
        assert sum(int(part.target_counts()) for part in parts) == int(batch.target_counts())
    for stream in streams:
        stream.close()


def test_more_ranks_than_files_lose_no_sample(tmp_path: Path) -> None:
    write_climax(tmp_path / "climax", (2000, 2001), shards=1)
    splits = {"train": {"first": "2000", "last": "2000"}, "validation": {"first": "2001", "last": "2001"}}
    found = reader(tmp_path / "climax", lead_hours=24, splits=splits)
    windows = len(found.sources[0].windows.starts)
    assert windows == 363
    streams = [FieldBatchStream(found, global_batch=33, rank=rank, ranks=11, prefetch=0) for rank in range(11)]
    read = torch.cat([stream.batch(step).sample_indices for step in range(1, 12) for stream in streams]).numpy()
    assert sorted(found.locate(read).start.tolist()) == list(range(363))


def test_sources_are_mixed_by_weight(year: Path, tmp_path: Path) -> None:
    other = dataset(HOURS[:170])
    other["t850"] = other["t850"] + 10
    other.to_netcdf(tmp_path / "warm.nc")
    splits = {"train": {"first": "step 0", "last": "step 159"}}
    found = reader(FieldSource(path=str(year), weight=3.0), FieldSource(path=str(tmp_path / "warm.nc")), splits=splits)
    cases, batch = found.locate(np.arange(400)), found.read(np.arange(400))
    assert np.bincount(cases.source).tolist() == [300, 100]
    scale = found.statistics.variables["t850"]
    shift = batch.fields[:, 1].numpy() * scale.std + scale.mean - field("t850", HOURS[cases.start])
    np.testing.assert_allclose(shift, (10.0 * cases.source)[:, None, None] * np.ones((6, 8)), atol=1e-3)


def test_a_variable_that_one_source_lacks_is_refused(year: Path, tmp_path: Path) -> None:
    dataset(HOURS, ("z500", "t850")).to_netcdf(tmp_path / "two.nc")
    with pytest.raises(DataError, match=r"two\.nc has no variable u10"):
        reader(year, tmp_path / "two.nc")


def test_prepared_fields_give_the_same_samples(year: Path, tmp_path: Path) -> None:
    prepare_fields(
        FieldSource(path=str(year)),
        tmp_path / "out",
        variables=["u10", "t850", "z500"],
        statics=["orography"],
        shard_bytes=30000,
    )
    raw, prepared = (reader(path).read(np.arange(64)) for path in (year, tmp_path / "out"))
    assert raw.fields.equal(prepared.fields)
    assert raw.targets.equal(prepared.targets)


def test_the_fingerprint_is_of_everything_that_decides_a_sample(year: Path, tmp_path: Path) -> None:
    FieldSet(field_data(year)).statistics.write(tmp_path / "s.json")
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 2},
        {"lead_hours": [6, 12]},
        {"inputs": ["t850", "z500", "u10"]},
        {"outputs": ["t850"]},
        {"static": []},
        {"statistics": str(tmp_path / "s.json")},
        {"splits": {"train": {"first": "step 0", "last": "step 158"}}},
    ]
    found = [reader(year, **change).fingerprint for change in changes]
    assert len(set(found)) == len(changes)
    assert found[0] == reader(year).fingerprint


def test_the_fingerprint_is_of_the_values(tmp_path: Path) -> None:
    changed = dataset(HOURS)
    changed.to_netcdf(tmp_path / "plain.nc")
    changed["u10"][100, 0, 0] = 99.0
    (tmp_path / "changed").mkdir()
    changed.to_netcdf(tmp_path / "changed" / "plain.nc")
    assert reader(tmp_path / "plain.nc").fingerprint != reader(tmp_path / "changed" / "plain.nc").fingerprint


def test_a_batch_is_cut_and_counted(year: Path) -> None:
    batch = reader(year).read(np.arange(6))
    parts = list(batch.split(3))
    assert [part.sample_indices.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert torch.cat([part.fields for part in parts]).equal(batch.fields)
    assert batch.target_counts().tolist() == [6 * 3 * 48]
    moved = batch.to(torch.device("cpu"))
    assert isinstance(moved, FieldBatch)
    x, named = moved.inputs()
    assert x is moved.fields
    assert named.keys() == {"fields_BVHW", "targets_BVHW", "lead_hours_B"}
    assert named["lead_hours_B"].equal(batch.lead_hours)


def test_cases_are_every_forecast_once(year: Path) -> None:
    found = FieldSet(field_data(year)).reader("test", seed=0, leads=[12, 24])
    cases = found.cases()
    assert len(cases) == 33 + 31
    assert set((cases.target - cases.start).tolist()) == {2, 4}
    assert found.lead_hours(cases).tolist() == ((cases.target - cases.start) * 6).tolist()
    assert len(set(zip(cases.start.tolist(), cases.target.tolist(), strict=True))) == len(cases)
