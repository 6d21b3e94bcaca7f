"""Checkpoints copied to an S3 server of this process: whole or absent there, kept by the rule, and loaded again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from moto.server import ThreadedMotoServer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import phalanx_processes
from cli.conftest import call
from command_line import Call
from distributed_ranks import run_ranks
from phalanx import remote_files
from phalanx.checkpoint import CheckpointStore, UploadAddress, read_tensors
from phalanx.checkpoint.upload import Uploader
from phalanx.cli.main import main
from phalanx.errors import CheckpointError, ConfigError, Interrupted
from phalanx.object_store import Store
from phalanx.remote_files import use_cache, weights_path
from phalanx.training.callbacks import CALLBACKS, Callback
from saved_states import assert_same_bits, every_dtype, small_state, zeros_like
from token_data import write_run_file, write_token_folder

__all__ = ["call"]


class S3:
    """A server of objects in this process, and its bucket."""

    def __init__(self, port: int = 0) -> None:
        self.server = ThreadedMotoServer(port=port, verbose=False)
        self.server.start()
        host, self.port = self.server.get_host_and_port()
        self.settings = {"endpoint_url": f"http://{host}:{self.port}", "key": "test", "secret": "test"}
        fsspec.config.conf["s3"] = self.settings
        self.files = fsspec.filesystem("s3")
        self.files.makedirs("bucket", exist_ok=True)

    def steps(self, run: str) -> list[str]:
        """Return the names of the folders with a manifest."""
        self.files.invalidate_cache()
        found = self.files.find(f"bucket/{run}/checkpoints")
        return sorted(name.split("/")[-2] for name in found if name.endswith("/manifest.json"))

    def objects(self, run: str) -> list[str]:
        """Return the names of all objects from the run's checkpoints on."""
        self.files.invalidate_cache()
        return [name.partition("/checkpoints/")[2] for name in self.files.find(f"bucket/{run}/checkpoints")]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    made = S3()
    yield made
    made.server.stop()


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: S3) -> None:
    monkeypatch.setattr(remote_files._PROCESS, "folders", {})
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.settings)
    use_cache(str(tmp_path / "cache"), 1.0, 5.0)


def open_store(
    run_dir: Path, address: str, warnings: list[str] | None = None, *, upload_limit_s: float = 30.0, **options: Any
) -> CheckpointStore:
    """A store in `run_dir` that uploads to `address`."""
    run_dir.mkdir(exist_ok=True)
    warn: Callable[[str], None] = (lambda _: None) if warnings is None else warnings.append
    settings = {"keep_last": 2, "on_failure": "warn", **options}
    return CheckpointStore(
        run_dir / "checkpoints", warn=warn, upload=UploadAddress(address, upload_limit_s), **settings
    )


def wait_until(happened: Callable[[], bool]) -> None:
    """Return when `happened`, which must be within a minute."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_whose_directory_is_gone_goes_on_from_the_store(s3: S3, tmp_path: Path) -> None:
    tensors, told = every_dtype(), []
    with open_store(tmp_path / "a", "s3://bucket/gone", on_upload=lambda step, _: told.append(step)) as store:
        (tmp_path / "a" / "tokenizer").mkdir()
        (tmp_path / "a" / "tokenizer" / "tokenizer.json").write_text("{}")
        store.save(3, tensors, {"step": 3}, asynchronous=True)
        store.save(7, tensors, {"step": 7})
    assert s3.steps("gone")[-1] == "step-00000007" and told[-1] == 7
    with open_store(tmp_path / "b", "s3://bucket/gone") as store:
        assert store.fetch_newer() == 7
        found = zeros_like(tensors)
        loaded = store.load_newest_usable(found)
        assert loaded is not None and loaded[1] == {"step": 7}
        assert_same_bits(found, tensors)
        assert store.fetch_newer() is None
    # As an address of weights, with what belongs to them.
    copied = weights_path("s3://bucket/gone")
    assert_same_bits(read_tensors(copied), tensors)
    assert (copied.parent.parent / "tokenizer" / "tokenizer.json").read_text() == "{}"


def test_retention_is_that_of_the_run_directory(s3: S3, tmp_path: Path) -> None:
    warnings: list[str] = []
    # Of a run that was killed while it uploaded.
    s3.files.pipe_file("bucket/kept/checkpoints/step-00000001/rank-00000-000.safetensors", b"half")
    with open_store(tmp_path / "a", "s3://bucket/kept", warnings, keep_every=20) as store:
        for step in (10, 20, 30, 40, 50):
            store.save(step, small_state(step), {})
            wait_until(lambda name=f"step-{step:08d}": name in s3.steps("kept"))
    assert s3.steps("kept") == [f"step-{step:08d}" for step in (20, 40, 50)]
    assert not [name for name in s3.objects("kept") if name[:13] in ("step-00000001", "step-00000010", "step-00000030")]
    # The run goes on from an earlier step: later ones are set aside, not deleted.
    for later in (tmp_path / "a" / "checkpoints").glob("step-000000[45]0"):
        shutil.rmtree(later)
    with open_store(tmp_path / "a", "s3://bucket/kept", warnings) as store:
        store.save(35, small_state(35), {})
    assert s3.steps("kept") == ["step-00000020", "step-00000035"]
    assert "step-00000050/manifest.superseded.json" in s3.objects("kept")
    assert any("step-00000050 is of a later step than 35" in text for text in warnings)
    with open_store(tmp_path / "c", "s3://bucket/kept", warnings) as store:
        assert store.fetch_newer() == 35


def test_damaged_and_half_uploaded_ones_are_passed_over(s3: S3, tmp_path: Path) -> None:
    with open_store(tmp_path / "a", "s3://bucket/hurt", keep_last=9) as store:
        for step in (1, 2, 3, 4):
            store.save(step, small_state(step), {})
            wait_until(lambda name=f"step-{step:08d}": name in s3.steps("hurt"))
    data = "bucket/hurt/checkpoints/step-0000000{}/rank-00000-000.safetensors"
    content = bytearray(s3.files.cat_file(data.format(3)))
    content[-1] ^= 1
    s3.files.pipe_file(data.format(3), bytes(content))
    s3.files.pipe_file(data.format(2), bytes(content[:-1]))
    s3.files.rm("bucket/hurt/checkpoints/step-00000004/manifest.json")
    warnings: list[str] = []
    with open_store(tmp_path / "b", "s3://bucket/hurt", warnings) as store:
        assert store.fetch_newer() == 1
        assert [one.step for one in store.list()] == [1]
    assert len(warnings) == 3 and "step-00000004 was not uploaded whole" in warnings[0]
    assert "checksum expected" in warnings[1] and "bytes expected" in warnings[2]
    # A damaged one does not count among those to keep.
    with open_store(tmp_path / "b", "s3://bucket/hurt", keep_last=1) as store:
        store.save(5, small_state(5), {})
    assert s3.steps("hurt") == ["step-00000005"]


def test_a_dead_store_costs_a_warning_and_is_caught_up_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mortal, warnings = S3(), list[str]()
    with open_store(tmp_path / "a", "s3://bucket/back", warnings, keep_last=1, upload_limit_s=2.0) as store:
        mortal.server.stop()
        for step in (1, 2, 3):
            handle = store.save(step, small_state(step), {}, asynchronous=True)
        handle.join()
        assert handle.error is None
        wait_until(lambda: bool(warnings))
        # All but the newest would be deleted by now; what waits to be uploaded stays.
        assert [one.step for one in store.list()] == [3, 2, 1]
        mortal = S3(mortal.port)
        wait_until(lambda: mortal.steps("back") == ["step-00000003"])
    mortal.server.stop()
    assert "step 1 cannot be uploaded" in warnings[0] and "succeed again" in warnings[1]
    # With the store down a run goes on from what its directory has, and one that has nothing does not begin anew.
    with open_store(tmp_path / "a", "s3://bucket/back", warnings, upload_limit_s=2.0) as store:
        assert store.fetch_newer() is None and "is not known" in warnings[-1]
        store.save(4, small_state(4), {})
    assert "checkpoints of steps 4 are not at s3://bucket/back" in warnings[-1]
    refused = pytest.raises(CheckpointError, match=r"checkpoint.upload=s3://bucket/back: .*did not answer")
    with open_store(tmp_path / "b", "s3://bucket/back", upload_limit_s=2.0) as store, refused:
        store.fetch_newer()


def test_a_run_that_failed_waits_for_no_upload(tmp_path: Path) -> None:
    mortal, warnings, start = S3(), list[str](), time.monotonic()
    mortal.server.stop()
    with (
        pytest.raises(ZeroDivisionError),
        open_store(tmp_path / "a", "s3://bucket/failed", warnings, upload_limit_s=120) as store,
    ):
        store.save(1, small_state(1), {})
        raise ZeroDivisionError
    assert time.monotonic() - start < 60 and "checkpoints of steps 1 are not at" in warnings[-1]


def test_a_run_that_is_told_to_stop_waits_little_for_a_dead_store(tmp_path: Path) -> None:
    mortal, warnings, start = S3(), list[str](), time.monotonic()
    mortal.server.stop()
    with (
        pytest.raises(Interrupted),
        open_store(tmp_path / "a", "s3://bucket/told", warnings, upload_limit_s=120) as store,
    ):
        store.save(1, small_state(1), {})
        raise Interrupted("asked to stop", signal.SIGTERM)
    assert time.monotonic() - start < 30 and "checkpoints of steps 1 are not at" in warnings[-1]


def test_a_wrong_address_is_refused(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    UploadAddress("s3://bucket/right", 5.0).refuse_unwritable()
    assert not s3.files.exists("bucket/right")
    with pytest.raises(ConfigError, match=r"checkpoint.upload=s3://no-such-bucket/x: .*create the bucket"):
        UploadAddress("s3://no-such-bucket/x", 5.0).refuse_unwritable()

    def refuse(*_: Any) -> None:
        raise PermissionError("Access Denied")

    closed = UploadAddress("s3://bucket/x", 5.0)
    monkeypatch.setattr(closed.run._files, "pipe_file", refuse)
    with pytest.raises(ConfigError, match=r"access refused.*set the credentials"):
        closed.refuse_unwritable()


def test_training_goes_on_from_the_store_to_the_bit(s3: S3, tmp_path: Path, call: Call) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "tokens"))
    begun = ["train", str(run_file), "data.prefetch=1", "--run-dir"]
    assert call(*begun, str(tmp_path / "whole"), "training.steps=8").code == 0
    upload = ["training.steps=8", "checkpoint.upload=s3://bucket/trained"]
    assert call(*begun, str(tmp_path / "a"), *upload, "--until", "5").code == 0
    # A run that is not to go on finds them too, and copies nothing.
    refused = call(*begun, str(tmp_path / "fresh"), *upload, "training.resume=never")
    assert (
        refused.code == 1 and "s3://bucket/trained holds checkpoints; choose another checkpoint.upload" in refused.err
    )
    assert not list((tmp_path / "fresh" / "checkpoints").glob("step-*"))
    events = (tmp_path / "a" / "events.jsonl").read_text()
    assert '"kind": "upload"' in events.replace('":"', '": "')
    shutil.rmtree(tmp_path / "a")
    assert call(*begun, str(tmp_path / "a"), *upload).code == 0
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 3
    assert s3.steps("trained") == ["step-00000005", "step-00000008"]
    found, expected = (read_tensors(tmp_path / run / "checkpoints" / "step-00000008") for run in ("a", "whole"))
    assert_same_bits(found, expected)
    refused = call(*begun, str(tmp_path / "b"), "training.steps=8", "checkpoint.upload=s3://no-such-bucket/x")
    assert refused.code != 0 and "checkpoint.upload=s3://no-such-bucket/x" in refused.err
    assert not (tmp_path / "b").exists()


def train_and_die(words: Sequence[str]) -> None:
    """Run `phalanx WORDS[1:]`, killed when its second checkpoint lacks but the manifest at the store. words[0]: settings."""
    fsspec.config.conf["s3"] = json.loads(words[0])
    write = Store.write

    def die_or_write(store: Store, name: str, content: bytes) -> None:
        if name == "step-00000008/manifest.json":
            os.kill(os.getpid(), signal.SIGKILL)
        write(store, name, content)

    Store.write = die_or_write  # type: ignore[method-assign]
    main(words[1:])


def test_a_run_killed_in_an_upload_goes_on_from_its_last_whole_checkpoint(s3: S3, tmp_path: Path, call: Call) -> None:
    run_file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "tokens"))
    begun = ["train", str(run_file), "checkpoint.every=4", "data.prefetch=1", "--run-dir"]
    assert call(*begun, str(tmp_path / "whole"), "training.steps=16").code == 0
    upload = "checkpoint.upload=s3://bucket/killed"
    words = [json.dumps(s3.settings), *begun, str(tmp_path / "a"), "training.steps=16", upload, "--until", "12"]
    code, _ = phalanx_processes.start(words, command=train_and_die).finish()
    assert code == -signal.SIGKILL and s3.steps("killed") == ["step-00000004"]
    assert "step-00000008/rank-00000-000.safetensors" in s3.objects("killed")
    # Without its directory the run goes on from the one that is whole at the store; with it, from its own newest one.
    gone = call(*begun, str(tmp_path / "b"), "training.steps=16", "--until", "6", upload)
    assert gone.code == 0, gone.err
    assert "step-00000008 was not uploaded whole; passed over" in gone.err
    assert len((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()) == 2
    again = call(*begun, str(tmp_path / "a"), "training.steps=16", upload)
    assert again.code == 0, again.err
    assert s3.steps("killed")[-1] == "step-00000016"
    # What was half there is gone, or whole.
    assert {name.partition("/")[0] for name in s3.objects("killed")} == set(s3.steps("killed"))
    found, expected = (read_tensors(tmp_path / run / "checkpoints" / "step-00000016") for run in ("a", "whole"))
    assert_same_bits(found, expected)


def test_a_store_that_dies_leaves_training_running(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    mortal, write = S3(), Store.write
    monkeypatch.setitem(fsspec.config.conf, "s3", mortal.settings)
    build, warnings = Uploader.__init__, list[str]()

    def build_with_record(uploader: Uploader, *arguments: Any, warn: Callable[[str], None], **options: Any) -> None:
        def tell(warning: str) -> None:
            warn(warning)
            warnings.append(warning)

        build(uploader, *arguments, warn=tell, **options)

    class Patience(Callback):
        """Holds steps up, of which sixteen take less time than a store takes to die."""

        def on_step_begin(self, step: int) -> None:
            if step == 12:
                wait_until(lambda: bool(warnings))

    monkeypatch.setattr(Uploader, "__init__", build_with_record)
    monkeypatch.setitem(CALLBACKS._items, "patience", Patience)

    def write_and_die(store: Store, name: str, content: bytes) -> None:
        write(store, name, content)
        if name == "step-00000004/manifest.json":
            mortal.server.stop()

    monkeypatch.setattr(Store, "write", write_and_die)
    run_file = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "tokens"))
    begun = ["train", str(run_file), "checkpoint.every=4", "checkpoint.upload=s3://bucket/dies"]
    ended = call(
        *begun,
        "--run-dir",
        str(tmp_path / "a"),
        "training.steps=16",
        "remote.timeout_s=10",
        "training.callbacks=[{name: patience}]",
    )
    assert ended.code == 0, ended.err
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 16
    assert "cannot be uploaded; tried again until it can, training goes on" in ended.err
    assert "16 are not at s3://bucket/dies; they are in" in ended.err
    # With its directory the run goes on from where it was, the store still being dead.
    begun.append("remote.timeout_s=1")
    again = call(*begun, "--run-dir", str(tmp_path / "a"), "training.steps=20")
    assert again.code == 0, again.err
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 20
    # Without, it does not begin anew as if there were nothing.
    refused = call(*begun, "--run-dir", str(tmp_path / "b"), "training.steps=20")
    assert refused.code == 1 and "s3://bucket/dies" in refused.err and "did not answer" in refused.err


def upload_on_ranks(run_dir: Path, settings: dict[str, Any]) -> Tensor:
    """Save a sharded tensor; rank 1 lags behind, and is not waited for by what trains."""
    fsspec.config.conf["s3"] = settings
    whole = torch.arange(35, dtype=torch.float32).view(7, 5)
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    if dist.get_rank() == 1:
        write_file = Store.write_file

        def lag(*arguments: Any) -> None:
            wait_until((run_dir / "go").exists)
            write_file(*arguments)

        Store.write_file = lag  # type: ignore[method-assign]
    with open_store(run_dir, "s3://bucket/ranks", upload_limit_s=60) as store:
        store.save(1, {"w": sharded}, {"step": 1})
        store._ranks.on_first(lambda: _refuse_manifest(settings))
        (run_dir / "go").touch()
    return whole


def _refuse_manifest(settings: dict[str, Any]) -> None:
    files = fsspec.filesystem("s3", **settings, use_listings_cache=False)
    wait_until(lambda: bool(files.exists("bucket/ranks/checkpoints/step-00000001/state.json")))
    assert not files.exists("bucket/ranks/checkpoints/step-00000001/manifest.json")


def test_ranks_upload_their_own_and_the_manifest_comes_last(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (whole, _) = run_ranks(upload_on_ranks, 2, tmp_path / "a", s3.settings)
    assert sorted(s3.objects("ranks")) == [
        f"step-00000001/{name}"
        for name in ("manifest.json", "rank-00000-000.safetensors", "rank-00001-000.safetensors", "state.json")
    ]
    # On one rank, whole.
    found = {"w": torch.zeros(7, 5)}
    with open_store(tmp_path / "b", "s3://bucket/ranks") as store:
        assert store.fetch_newer() == 1
        store.load_newest_usable(found)
    assert_same_bits(found, {"w": whole})
