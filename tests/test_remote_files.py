"""Data and weights by address, against an S3 server of this process; and what happens when that dies."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

import phalanx_processes
from cli.conftest import call
from command_line import Call
from field_files import field_data, write_year
from foreign_tokens import MDS_FLAT, write_megatron, write_tokens
from graph_files import prepared_sources
from phalanx import object_store, remote_files
from phalanx.cli.main import main
from phalanx.data.prepared_folder import MANIFEST
from phalanx.errors import DataError
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.families.materials.data.graph_shards import open_prepared
from phalanx.families.weather.data.field_store import BlockCache
from phalanx.families.weather.data.open_fields import FieldSet, open_store
from phalanx.families.weather.data.prepare_fields import prepare_fields
from phalanx.object_store import StoreUnavailable
from phalanx.remote_files import is_kept_elsewhere, is_remote, local_path, use_cache, weights_path
from token_data import write_run_file, write_token_folder

__all__ = ["call"]


class S3:
    """A server of objects in this process, and its bucket."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(port=0, verbose=False)
        self.server.start()
        host, port = self.server.get_host_and_port()
        self.settings = {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test"}
        # As a user's ~/.config/fsspec does.
        fsspec.config.conf["s3"] = self.settings
        self.files = fsspec.filesystem("s3")
        self.files.makedirs("bucket", exist_ok=True)

    def put(self, folder: Path, name: str) -> str:
        """Copy a folder to the bucket; return its address."""
        self.files.put(f"{folder}/", f"bucket/{name}/", recursive=True)
        return f"s3://bucket/{name}"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    made = S3()
    yield made
    made.server.stop()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_token_folder(tmp_path_factory.mktemp("tokens") / "local")


@pytest.fixture(scope="module")
def address(s3: S3, tokens: Path) -> str:
    return s3.put(tokens, "tokens")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3) -> Path:
    """A cache of this test alone, and blocks so small that folders of tests have many."""
    monkeypatch.setattr(remote_files, "BLOCK", 2048)
    monkeypatch.setattr(remote_files._PROCESS, "folders", {})
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.settings)
    use_cache(str(tmp_path / "cache"), 1.0, 5.0)
    return tmp_path / "cache"


def _kept_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for kind in ("blocks", "files") for path in (cache / kind).glob("*/*/*"))


def _changes(cache: Path) -> list[str]:
    return [f"remote.cache={cache}", "remote.timeout_s=2"]


def _losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_local_places_stay_as_they_are(tmp_path: Path) -> None:
    assert local_path("data/x") == Path("data/x")
    assert local_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert weights_path("runs/x") == Path("runs/x")
    assert is_remote("s3://b/x") and not is_remote("file:///x") and not is_remote("a:b")


def test_tokens_are_those_of_the_local_folder(tokens: Path, address: str) -> None:
    near, far = open_source(tokens, "train"), open_source(local_path(address), "train")
    assert (far.fingerprint, far.tokens, far.vocab_size) == (near.fingerprint, near.tokens, near.vocab_size)
    # Across the two shards, out of order, the very last token included.
    starts = np.array([near.tokens - 700, 5, 29_900, 29_990, 0, 41_003])
    assert (far.read(starts, 700) == near.read(starts, 700)).all()
    assert (far.document_of(starts) == near.document_of(starts)).all()
    far.verify()
    assert far.tokenizer is not None and far.tokenizer.read_bytes() == (tokens / "tokenizer.json").read_bytes()
    held_out = open_source(local_path(address), "validation")
    assert held_out is not None and held_out.tokens == 3_000


def test_only_what_is_read_is_fetched_and_once(address: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(local_path(address), "train")
    asked: list[int] = []
    whole = object_store.Store.read_ranges

    def count(store: Any, ranges: Any) -> list[bytes]:
        asked.extend(last - first for _, first, last in ranges)
        return whole(store, ranges)

    monkeypatch.setattr(object_store.Store, "read_ranges", count)
    first = source.read(np.array([100, 20_000]), 64)
    assert 0 < sum(asked) <= 4 * 2048
    asked.clear()
    assert (source.read(np.array([100, 20_000]), 64) == first).all() and asked == []
    # A block that was damaged on this machine is fetched again.
    (block,) = (cache / "blocks").glob("*/*/0")
    block.write_bytes(block.read_bytes()[:-8] + b"\0" * 8)
    assert (source.read(np.array([100, 20_000]), 64) == first).all() and asked == [2048]


def test_the_cache_stays_within_its_bound(address: str, tokens: Path, cache: Path) -> None:
    use_cache(str(cache), 32e-6, 5.0)
    far, near = open_source(local_path(address), "train"), open_source(tokens, "train")
    for start in range(0, 59_000, 1_000):
        assert (far.read(np.array([start]), 900) == near.read(np.array([start]), 900)).all()
    assert 16_000 < _kept_bytes(cache) <= 40_000


def test_what_is_wrong_with_a_folder_is_told(s3: S3, tokens: Path, address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/nothing: no manifest.json there; name a folder"):
        local_path("s3://bucket/nothing")
    broken = tmp_path / "broken"
    shutil.copytree(tokens, broken)
    (broken / "train-00001.bin").write_bytes(b"12")
    with pytest.raises(DataError, match=r"broken/train-00001.bin: 2 bytes found, \d+ bytes expected"):
        local_path(s3.put(broken, "broken"))
    with pytest.raises(DataError, match=r"nowhere://x: .*other protocols need the fsspec package"):
        local_path("nowhere://x")
    # As long as it was, with other content.
    content = bytearray((tokens / "train-00001.bin").read_bytes())
    content[9] ^= 1
    (broken / "train-00001.bin").write_bytes(content)
    altered = open_source(local_path(s3.put(broken, "altered")), "train")
    with pytest.raises(DataError, match=r"altered/train-00001.bin: sha256"):
        altered.verify()


def test_a_server_that_lists_nothing_is_enough(tokens: Path, cache: Path) -> None:
    """`https://` gives files by name alone; `memory://` stands in for it."""
    files = fsspec.filesystem("memory")
    files.put(f"{tokens}/", "/tokens/", recursive=True)
    far, near = open_source(local_path("memory://tokens"), "train"), open_source(tokens, "train")
    assert (far.read(np.array([3]), 50) == near.read(np.array([3]), 50)).all()


def test_structures_are_those_of_the_local_folder(s3: S3, tmp_path: Path) -> None:
    data = prepared_sources(tmp_path, structures=30)
    far = data.model_copy(update={"prepared": s3.put(Path(data.prepared), "graphs")})
    for near, there in zip(open_prepared(data, "train"), open_prepared(far, "train"), strict=True):
        assert there.fingerprint == near.fingerprint and len(there) == len(near)
        items = np.arange(len(near))
        assert all((a == b).all() for a, b in zip(there.sizes(items), near.sizes(items), strict=True))
        for number in range(len(near.manifest.shards)):
            ours, theirs = near.shard(number), there.shard(number)
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name], equal_nan=True) for name in ours)
        there.verify()


def test_fields_are_those_of_the_local_store(s3: S3, tmp_path: Path) -> None:
    write_year(tmp_path, steps=240, files=1)
    data = field_data(tmp_path)
    source, names = data.sources[0], [*data.inputs]
    prepare_fields(source, tmp_path / "prepared", variables=names, statics=data.static, cache_mb=8)
    near = data.sources[0].model_copy(update={"path": str(tmp_path / "prepared")})
    far = near.model_copy(update={"path": s3.put(tmp_path / "prepared", "fields")})
    stores = [open_store(one, names, data.static, BlockCache(2**20)) for one in (near, far)]
    assert stores[0].fingerprint == stores[1].fingerprint
    frames = np.array([239, 0, 17, 18])
    for variables in ([0, 1], [1]):
        assert (stores[0].read(frames, variables) == stores[1].read(frames, variables)).all()
    assert (stores[0].read_static() == stores[1].read_static()).all()


def test_a_zarr_store_is_read_where_it_lies(s3: S3, tmp_path: Path) -> None:
    import xarray  # noqa: PLC0415

    write_year(tmp_path / "files", steps=240, files=1)
    (file,) = sorted((tmp_path / "files").glob("*.nc"))
    xarray.open_dataset(file).to_zarr(tmp_path / "year.zarr")
    data = field_data(tmp_path / "files")
    far = data.sources[0].model_copy(update={"path": s3.put(tmp_path / "year.zarr", "year.zarr")})
    stores = [open_store(one, data.inputs, data.static, BlockCache(2**20)) for one in (data.sources[0], far)]
    frames = np.array([0, 239])
    assert (stores[0].read(frames, [0, 1]) == stores[1].read(frames, [0, 1])).all()
    assert FieldSet(data.model_copy(update={"sources": [far]})).statistics.frames > 0


def test_training_by_address_is_training_on_a_folder(
    s3: S3, tokens: Path, address: str, cache: Path, tmp_path: Path, call: Call
) -> None:
    """The same losses, resumed in the middle, and weights that come from the store again."""
    near = write_run_file(tmp_path / "near.yaml", tokens)
    far = write_run_file(tmp_path / "far.yaml", Path("ADDRESS"))
    far.write_text(far.read_text().replace("ADDRESS", address))
    short = ["training.steps=12", "data.prefetch=1"]
    assert call("train", str(near), "--run-dir", str(tmp_path / "a"), *short).code == 0
    assert (
        call("train", str(far), "--run-dir", str(tmp_path / "b"), *short, "training.steps=6", *_changes(cache)).code
        == 0
    )
    assert call("train", str(far), "--run-dir", str(tmp_path / "b"), *short, *_changes(cache)).code == 0
    assert _losses(tmp_path / "a")[:5] == _losses(tmp_path / "b")[:5] and len(_losses(tmp_path / "b")) == 12
    stored = s3.put(tmp_path / "b", "run")
    begun = ["train", str(near), *short, "training.steps=13", *_changes(cache)]
    assert call(*begun, "--run-dir", str(tmp_path / "c"), f"training.init_from={stored}").code == 0
    assert call(*begun, "--run-dir", str(tmp_path / "d"), f"training.init_from={tmp_path / 'b'}").code == 0
    assert _losses(tmp_path / "c") == _losses(tmp_path / "d")
    # The whole state, where a run resumes.
    found = call(*begun, "--run-dir", str(tmp_path / "e"), f"training.resume={stored}")
    assert found.code == 0 and len(_losses(tmp_path / "e")) == 1
    missing = call(*begun, "--run-dir", str(tmp_path / "f"), "training.init_from=s3://bucket/tokens")
    assert missing.code == 1 and "s3://bucket/tokens: no checkpoint there" in missing.err


def test_a_dead_store_is_told_in_time(tokens: Path) -> None:
    mortal = S3()
    address = mortal.put(tokens, "tokens")
    source = open_source(local_path(address), "train")
    kept = source.read(np.array([100]), 64)
    mortal.server.stop()
    # What was read before is still there.
    assert (source.read(np.array([100]), 64) == kept).all()
    use_cache(None, 1.0, 1.0)
    begin = time.monotonic()
    with pytest.raises(
        StoreUnavailable, match=r"s3://bucket/tokens/manifest.json: the store did not answer within 1 s"
    ):
        local_path(f"{address}/")
    assert time.monotonic() - begin < 4


def test_a_store_that_dies_while_training_costs_no_step(
    tokens: Path, cache: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = S3()
    file = write_run_file(tmp_path / "run.yaml", Path("ADDRESS"))
    file.write_text(file.read_text().replace("ADDRESS", mortal.put(tokens, "tokens")))
    fetch, asked = object_store.Store.read_ranges, []

    def fetch_until_death(store: Any, ranges: Any) -> list[bytes]:
        asked.append(ranges)
        if len(asked) == 5:
            mortal.server.stop()
        return fetch(store, ranges)

    monkeypatch.setattr(object_store.Store, "read_ranges", fetch_until_death)
    words = ["train", str(file), "--run-dir", str(tmp_path / "run"), "checkpoint.every=100", *_changes(cache)]
    outcome = call(*words)
    assert outcome.code == 1
    assert "the store did not answer within 2 s" in outcome.err and "checkpoint written" in outcome.err
    steps = len(_losses(tmp_path / "run"))
    assert 0 < steps < 40
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:08d}" / MANIFEST).exists()


def _main_with_store(words: Sequence[str]) -> None:
    """Run the command `words[1:]` with the settings of a store, `words[0]`."""
    fsspec.config.conf["s3"] = json.loads(words[0])
    main(words[1:])


def test_a_store_that_dies_ends_all_ranks_behind_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mortal = S3()
    # As many blocks of the real size as two ranks do not read within some steps.
    address = mortal.put(write_token_folder(tmp_path / "large", train_tokens=4_000_000), "large")
    file = write_run_file(tmp_path / "run.yaml", Path("ADDRESS"))
    file.write_text(file.read_text().replace("ADDRESS", address))
    run_dir = tmp_path / "run"
    words = ["train", str(file), "--run-dir", str(run_dir), "data.prefetch=0", "training.steps=4000"]
    words += ["checkpoint.every=null", *_changes(tmp_path / "cache")]
    ranks = phalanx_processes.start([json.dumps(mortal.settings), *words], 2, _main_with_store)
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 100
    while ranks.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    mortal.server.stop()
    code, written = ranks.finish()
    assert code == 1, written[-2000:]
    steps = len(_losses(run_dir))
    assert 2 <= steps < 4000
    assert f"training ends after step {steps}, checkpoint written" in written
    assert (run_dir / "checkpoints" / f"step-{steps:08d}" / MANIFEST).exists()


def _compress_a_shard(folder: Path) -> None:
    """As MDSWriter(compression="gz") leaves a folder: the plain shard is gone, and the index names both."""
    plain = folder / "shard.00001.mds"
    packed = folder / f"{plain.name}.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    index = json.loads((folder / "index.json").read_text())
    record = {"basename": packed.name, "bytes": packed.stat().st_size, "hashes": {}}
    index["shards"][1] |= {"compression": "gz", "zip_data": record}
    (folder / "index.json").write_text(json.dumps(index))


def _write_foreign(folder: Path, kind: str) -> str:
    """Data of another program with a validation split; returns what names it in the folder."""
    folder.mkdir()
    if kind == "Megatron":
        write_megatron(folder / "text_document")
        write_megatron(folder / "text_document_valid", [[1, 2, 3]])
        return "text_document"
    if kind == "MDS, splits":
        write_tokens(folder / "train", hashes=("sha256",))
        _compress_a_shard(folder / "train")
        write_tokens(folder / "val", lists=[[[1, 2, 3]]])
    else:
        write_tokens(folder)
    return ""


@pytest.mark.parametrize("kind", ["Megatron", "MDS, splits", "MDS"])
def test_data_of_other_programs_is_that_of_the_local_folder(kind: str, s3: S3, tmp_path: Path) -> None:
    folder = tmp_path / kind.replace(", ", "-")
    name = _write_foreign(folder, kind)
    address = f"{s3.put(folder, folder.name)}/{name}".rstrip("/")
    for split in ("train", "validation"):
        near, far = open_source(folder / name, split), open_source(token_path(address), split)
        if near is None or far is None:
            assert near is far and (kind, split) == ("MDS", "validation")
            continue
        assert (far.fingerprint, far.tokens, far.documents) == (near.fingerprint, near.tokens, near.documents)
        starts = np.arange(near.tokens - 2)
        assert (far.read(starts, 3) == near.read(starts, 3)).all()
        assert (far.document_of(starts) == near.document_of(starts)).all()
        far.verify()
    # Data at an address is not read whole before a run begins.
    assert is_kept_elsewhere(token_path(address))


def test_shards_of_an_unlisted_store_are_read_by_the_index(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_foreign(tmp_path / "unlisted", "MDS, splits")
    address = s3.put(tmp_path / "unlisted", "unlisted")
    # As of https://.
    monkeypatch.setattr(object_store, "_UNLISTED", ("s3",))
    source = open_source(token_path(address), "train")
    assert source.read(np.array([0]), 24).tolist() == [MDS_FLAT]


def test_what_is_wrong_with_foreign_data_is_told(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/none: no manifest.json .*, no index.json .* and no .idx"):
        token_path("s3://bucket/none")
    short = write_tokens(tmp_path / "short")
    (short / "shard.00001.mds").write_bytes(b"12")
    with pytest.raises(DataError, match=r"s3://bucket/short/shard.00001.mds: 2 bytes found, \d+ expected"):
        token_path(s3.put(short, "short"))
    gone = write_tokens(tmp_path / "gone")
    (gone / "shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"gone/shard.00001.mds: No such file or directory; index.json lists it"):
        open_source(token_path(s3.put(gone, "gone")), "train")
    write_megatron(tmp_path / "cut")
    Path(f"{tmp_path}/cut.bin").write_bytes(b"12")
    for ending in (".bin", ".idx"):
        s3.files.put(f"{tmp_path}/cut{ending}", f"bucket/pairs/cut{ending}")
    with pytest.raises(DataError, match=r"pairs/cut.bin: 2 bytes found, 20 expected"):
        open_source(token_path("s3://bucket/pairs/cut"), "train")


def test_a_run_trains_on_megatron_data_at_an_address(s3: S3, tmp_path: Path, cache: Path, call: Call) -> None:
    ids = np.random.default_rng(0).integers(0, 97, (40, 65)).tolist()
    prefix = write_megatron(tmp_path / "corpus", ids)
    for ending in (".bin", ".idx"):
        s3.files.put(f"{prefix}{ending}", f"bucket/corpus{ending}")
    found = {}
    for place, source in (("near", str(prefix)), ("far", "s3://bucket/corpus")):
        run_file = write_run_file(tmp_path / f"{place}.yaml", Path("data"))
        words = [f"data.sources=[{source}]", "training.steps=2", "optimizer.warmup_steps=1", *_changes(cache)]
        outcome = call("train", str(run_file), "--run-dir", str(tmp_path / place), *words)
        assert outcome.code == 0, outcome.err
        found[place] = _losses(tmp_path / place)
    assert found["near"] == found["far"] and len(found["far"]) == 2
