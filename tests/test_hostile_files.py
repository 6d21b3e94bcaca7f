"""Files made by someone who means harm, given to the commands that read such files: a table of more than 60.

Each is read by the real command line, in one process that is watched: nothing in a file is executed, nothing outside of its
folder is opened, none takes more than 10 s or 2 GB, and each ends with a message or with success, never with a traceback.
What is refused in detail stands beside each reader's own tests.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phalanx.checkpoint.manifest import compute_checksum
from phalanx.cli.main import run_command_line
from phalanx.config.load import load_run
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder, write_tokenizer

MOST_S, MOST_BYTES = 10, 2 << 30
DATA = "rank-00000-000.safetensors"
MARK = f"/tmp/phalanx-hostile-mark-{os.getpid()}"
"""Exists once a file was executed."""


class Payload:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (MARK,))


PICKLE = pickle.dumps(Payload())
CODE = f"!!python/object/apply:os.mkdir ['{MARK}']"
_PACKER = zlib.compressobj(1, zlib.DEFLATED, 31)
_HEAD, _BLOCK = (_PACKER.compress(bytes(1 << 22)) + _PACKER.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
GZIP_BOMB = _HEAD + 999 * _BLOCK + _PACKER.flush()
"""Some 4 GB of zeros; blocks that are flushed do not depend on those before."""


class Place:
    """What cases are made of: a sound run, its data and a folder of their own; `secret` lies outside of all of them."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder
        self.secret = base / "secret"

    def copy(self, name: str) -> Path:
        """A copy of the sound run or of the sound data."""
        shutil.copytree(self.base / name, self.folder / name, symlinks=True)
        return self.folder / name

    def checkpoint(self) -> Path:
        return self.copy("run") / "checkpoints" / "step-00000002"

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


Case = Callable[[Place], list[str]]
"""Makes a hostile file and returns the words of the command that reads it."""
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(make: Case) -> Case:
        assert name not in CASES
        CASES[name] = make
        return make

    return keep


# --- checkpoints -------------------------------------------------------------------------------------------------------


def read_run(place: Place) -> list[str]:
    return ["convert", str(place.folder / "run"), str(place.folder / "converted")]


def with_file(name: str, content: bytes) -> Case:
    def make(place: Place) -> list[str]:
        (place.checkpoint() / name).write_bytes(content)
        return read_run(place)

    return make


for _name in ("manifest.json", "state.json", DATA):
    CASES[f"checkpoint: pickle as {_name}"] = with_file(_name, PICKLE)
    CASES[f"checkpoint: {_name} is empty"] = with_file(_name, b"")
CASES["checkpoint: brackets as manifest"] = with_file("manifest.json", b"[" * 10_000_000)
CASES["checkpoint: brackets as state"] = with_file("state.json", b"{" * 10_000_000)
CASES["checkpoint: header of 2**62 bytes"] = with_file(DATA, struct.pack("<Q", 1 << 62) + b"{}")


def linked(name: str, target: str) -> Case:
    def make(place: Place) -> list[str]:
        path = place.checkpoint() / name
        path.unlink()
        path.symlink_to(str(place.secret) if target == "secret" else target)
        return read_run(place)

    return make


CASES["checkpoint: state is a link outside"] = linked("state.json", "secret")
CASES["checkpoint: data is a link to /dev/zero"] = linked(DATA, "/dev/zero")


@case("checkpoint: data is a pipe")
def _pipe(place: Place) -> list[str]:
    path = place.checkpoint() / DATA
    path.unlink()
    os.mkfifo(path)
    return read_run(place)


@case("checkpoint: data of a terabyte")
def _terabyte(place: Place) -> list[str]:
    with (place.checkpoint() / DATA).open("r+b") as file:
        file.truncate(1 << 40)
    return read_run(place)


def with_manifest(change: Callable[[dict[str, Any], Place], None]) -> Case:
    def make(place: Place) -> list[str]:
        path = place.checkpoint() / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["crc32"]
        change(manifest, place)
        body = json.dumps(manifest).encode()[:-1] + b",\n"
        path.write_bytes(body + f'"crc32": "{compute_checksum(body)}"\n}}\n'.encode())
        return read_run(place)

    return make


CASES["checkpoint: file name with .."] = with_manifest(lambda m, p: m["files"][0].update(name="../../../../secret"))
CASES["checkpoint: absolute file name"] = with_manifest(lambda m, p: m["files"][0].update(name=str(p.secret)))
CASES["checkpoint: tensor of 10**18 elements"] = with_manifest(
    lambda m, p: m["tensors"][0].update(shape=[10**9, 10**9])
)
CASES["checkpoint: chunk of 10**12 elements"] = with_manifest(
    lambda m, p: m["tensors"][0]["chunks"][0].update(sizes=[10**6, 10**6])
)
CASES["checkpoint: negative offset"] = with_manifest(lambda m, p: m["tensors"][0]["chunks"][0].update(offsets=[-1, 0]))
CASES["checkpoint: a tensor twice"] = with_manifest(lambda m, p: m["tensors"].append(m["tensors"][0]))
CASES["checkpoint: a dtype that is code"] = with_manifest(lambda m, p: m["tensors"][0].update(dtype="os.system"))
CASES["checkpoint: control characters in a name"] = with_manifest(
    lambda m, p: m["tensors"][0].update(name="\x1b]0;x\x07")
)


def with_state(change: Callable[[dict[str, Any]], None]) -> Case:
    """A state that is changed and has right checksums."""

    def make(place: Place) -> list[str]:
        state_file = place.checkpoint() / "state.json"
        state = json.loads(state_file.read_text())
        change(state)
        text = json.dumps(state).encode()
        state_file.write_bytes(text)
        path = state_file.with_name("manifest.json")
        manifest = json.loads(path.read_text())
        del manifest["crc32"]
        manifest["state"] = {"bytes": len(text), "crc32": compute_checksum(text)}
        body = json.dumps(manifest).encode()[:-1] + b",\n"
        path.write_bytes(body + f'"crc32": "{compute_checksum(body)}"\n}}\n'.encode())
        return read_run(place)

    return make


CASES["checkpoint: run file in the state is code"] = with_state(lambda s: s.update(run=CODE))
CASES["checkpoint: run file in the state is deep"] = with_state(lambda s: s.update(run="[" * 100_000))
CASES["checkpoint: a model of 10**15 parameters"] = with_state(
    lambda s: s.update(run=s["run"].replace("d_model: 32", "d_model: 1000000").replace("n_layers: 2", "n_layers: 9999"))
)

# --- run files and descriptions ----------------------------------------------------------------------------------------

RUN_FILES = {
    "code": f"model: {CODE}\n",
    "code in a tag": f"training: {{steps: !!python/name:os.system }}\nx: {CODE}",
    "aliases": "a: &a [x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghijklmnopqrst")),
    "an alias of itself": "model: &m {a: *m}\n",
    "depth": "model: " + "[" * 100_000,
    "10,000 nested mappings": "".join("  " * depth + f"k{depth}:\n" for depth in range(400)),
    "a megabyte": "# comment\n" * 110_000,
    "NUL": "model: {preset: gpt2}\0",
    "no text": bytes(range(256)).decode("latin-1"),
    "a number of 100,000 digits": f"training: {{steps: {'9' * 100_000}}}\n",
    "an escape sequence as a field": '"\\e]0;title\\a": 1\n',
    "a preset that is a path": "model: {preset: ../../../../etc/passwd}\ntraining: {steps: 1}\n",
    "a preset file that is a link": "preset: /etc/passwd\n",
}
for _name, _text in RUN_FILES.items():
    CASES[f"run file: {_name}"] = lambda place, text=_text: ["config", "check", str(place.write("run.yaml", text))]


@case("run file: a terabyte")
def _terabyte_run(place: Place) -> list[str]:
    with place.write("run.yaml", "model:").open("r+b") as file:
        file.truncate(1 << 40)
    return ["config", "check", str(place.folder / "run.yaml")]


@case("run file: a pipe nobody writes to, by a link")
def _device_run(place: Place) -> list[str]:
    (place.folder / "run.yaml").symlink_to("/dev/zero")
    return ["config", "check", str(place.folder / "run.yaml")]


MACHINES = {
    "code": f"name: {CODE}\n",
    "a shell command as a module": "name: m\nabout: x\ndocuments: {}\nnode: {source: a, devices: 1, device: 'x; rm -rf /', "
    'cores_per_task: 1}\nsetup: [{line: "true\\nrm -rf /", reason: a, source: b}]\n',
    "10**9 devices of a node": "name: m\nabout: x\ndocuments: {}\nnode: {source: a, devices: 1000000000, device: H100 SXM, "
    "cores_per_task: 1}\nlinks: {source: a, kind: nvlink4, switch: {gb_s: 1}}\n",
    "depth": "[" * 100_000,
    "aliases": RUN_FILES["aliases"],
    "a megabyte": "# comment\n" * 110_000,
}
for _name, _text in MACHINES.items():
    CASES[f"machine: {_name}"] = lambda place, text=_text: [
        "plan", str(place.base / "run.yaml"), "--cluster", str(place.write("machine.yaml", text)), "--devices", "1",
    ]  # fmt: skip

# --- prepared data -----------------------------------------------------------------------------------------------------


def with_data(change: Callable[[Path, dict[str, Any], Place], None]) -> Case:
    """Prepared text whose manifest, or a file beside it, is another one."""

    def make(place: Place) -> list[str]:
        folder = place.copy("data")
        (path,) = folder.glob("manifest*.json")
        manifest = json.loads(path.read_text())
        change(folder, manifest, place)
        if not path.is_symlink():
            path.write_text(json.dumps(manifest))
        word = f'data.sources=["{folder}"]'
        return ["train", str(place.base / "run.yaml"), "--run-dir", str(place.folder / "out"), word, "training.steps=1"]

    return make


def first_shard(manifest: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = manifest["splits"]["train"]["shards"][0]
    return shard


def rename_file(record: dict[str, Any], name: str) -> None:
    record.update({key: name for key in record if key in ("name", "path", "file")})


CASES["data: shard name with .."] = with_data(lambda f, m, p: rename_file(first_shard(m)["data"], "../../../secret"))
CASES["data: absolute shard name"] = with_data(lambda f, m, p: rename_file(first_shard(m)["data"], str(p.secret)))
CASES["data: tokenizer elsewhere"] = with_data(lambda f, m, p: rename_file(m["tokenizer"]["file"], "../../secret"))
CASES["data: 10**15 tokens"] = with_data(lambda f, m, p: first_shard(m).update(tokens=10**15))
CASES["data: negative tokens"] = with_data(lambda f, m, p: first_shard(m).update(tokens=-1))
CASES["data: a dtype of objects"] = with_data(lambda f, m, p: m.update(dtype="object"))
CASES["data: vocabulary of 10**18"] = with_data(lambda f, m, p: m["tokenizer"].update(vocab_size=10**18))
CASES["data: splits are a list"] = with_data(lambda f, m, p: m.update(splits=[[]] * 1000))
CASES["data: a manifest of brackets"] = with_data(lambda f, m, p: m.update(inputs=json.loads("[" * 900 + "]" * 900)))


def _replace_by_link(folder: Path, name: str, target: Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


CASES["data: shard is a link outside"] = with_data(lambda f, m, p: _replace_by_link(f, "train-00000.bin", p.secret))
CASES["data: shard is a pipe"] = with_data(
    lambda f, m, p: ((f / "train-00000.bin").unlink(), os.mkfifo(f / "train-00000.bin"), None)[-1]
)
CASES["data: tokens beyond the vocabulary"] = with_data(
    lambda f, m, p: (f / "train-00000.bin").write_bytes(b"\xff" * (f / "train-00000.bin").stat().st_size) and None
)
CASES["data: a document that begins at -1"] = with_data(
    lambda f, m, p: (
        (f / "train-00000.documents").write_bytes(b"\xff" * (f / "train-00000.documents").stat().st_size) and None
    )
)

# --- tokenizers --------------------------------------------------------------------------------------------------------


def with_tokenizer(content: bytes | dict[str, Any]) -> Case:
    def make(place: Place) -> list[str]:
        path = place.folder / "tokenizer.json"
        write_tokenizer(path)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
        text = place.write("text.txt", "a" * 60 + "!")
        return ["data", "prepare", str(text), "--out", str(place.folder / "out"), "--tokenizer", str(path)]

    return make


def _replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


TOKENIZERS: dict[str, bytes | dict[str, Any]] = {
    "pickle": PICKLE,
    "brackets": b"[" * 5_000_000,
    "a text made 2**40 times longer": {
        "normalizer": {"type": "Sequence", "normalizers": [_replacing({"String": "a"}, "aa")] * 40}
    },
    "a pattern of exponential time": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "a pattern of the normalizer": {"normalizer": _replacing({"Regex": "(a+)+$"}, "b")},
    "an id of 2**31": {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 2**31}, "unk_token": "a"}},
    "an unknown kind": {"model": {"type": "os.system", "vocab": {}}},
    "merges of nothing": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]] * 1000}},
}
for _name, _content in TOKENIZERS.items():
    CASES[f"tokenizer: {_name}"] = with_tokenizer(_content)

# --- archives and packed files -----------------------------------------------------------------------------------------


def with_text(name: str, content: bytes) -> Case:
    def make(place: Place) -> list[str]:
        text = place.write(name, content)
        words = ["data", "prepare", str(text), "--out", str(place.folder / "out")]
        return [*words, "--tokenizer", str(place.base / "data" / "tokenizer.json")]

    return make


CASES["archive: 4 GB of zeros as .txt.gz"] = with_text("bomb.txt.gz", GZIP_BOMB)
CASES["archive: 4 GB of zeros as .jsonl.gz"] = with_text("bomb.jsonl.gz", GZIP_BOMB)
CASES["archive: half a gzip"] = with_text("half.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000)[:40])
CASES["archive: pickle as .parquet"] = with_text("a.parquet", PICKLE)
CASES["archive: pickle as .arrow"] = with_text("a.arrow", PICKLE)
CASES["archive: noise as .zst"] = with_text("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + os.urandom(100))
CASES["archive: a line of brackets"] = with_text("a.jsonl", b"[" * 10_000_000)
CASES["archive: NUL and escape sequences"] = with_text("a.jsonl", b'{"text": "\\u0000\\u001b]0;x\\u0007"}\n' * 3)


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def array(values: Any, *, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=allow_pickle)
    return buffer.getvalue()


def claims(shape: str, dtype: str = "<f8") -> bytes:
    """An array file whose header claims a shape and that holds nothing."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()


def with_structures(name: str, content: bytes) -> Case:
    def make(place: Place) -> list[str]:
        return ["data", "prepare", str(place.write(name, content)), "--out", str(place.folder / "out")]

    return make


CASES["archive: .npz with a pickled array"] = with_structures(
    "a.npz",
    zipped({"R.npy": array(np.array([Payload()], dtype=object), allow_pickle=True), "Z.npy": array(np.ones(1))}),
)
CASES["archive: .npz that leaves its folder"] = with_structures(
    "a.npz", zipped({"../../R.npy": array(np.ones((1, 2, 3)))})
)
CASES["archive: .npz that claims 10**18 numbers"] = with_structures(
    "a.npz", zipped({name: claims("(1000000000, 1000000000)") for name in ("R.npy", "Z.npy", "E.npy", "N.npy")})
)
CASES["archive: .npz of 4 GB of zeros"] = with_structures(
    "a.npz", zipped({f"{name}.npy": claims("(100000000, 1, 3)") + bytes(1 << 28) for name in ("R", "Z")})
)
CASES["archive: .npz that is no archive"] = with_structures("a.npz", b"PK\x03\x04" + os.urandom(1000))
CASES["structures: an .xyz of 10**12 atoms"] = with_structures("a.xyz", b"1000000000000\nenergy=1\nH 0 0 0\n")

# --- models of others --------------------------------------------------------------------------------------------------


def with_huggingface(config: dict[str, Any] | bytes, **files: bytes) -> Case:
    def make(place: Place) -> list[str]:
        folder = place.folder / "model"
        folder.mkdir()
        (folder / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
        for name, content in files.items():
            (folder / name.replace("__", ".").replace("_index", ".index")).write_bytes(
                content.replace(b"SECRET", str(place.secret).encode())
            )
        return ["convert", str(folder), str(place.folder / "converted")]

    return make


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip
CASES["model: code that comes with it"] = with_huggingface(
    {**LLAMA, "auto_map": {"AutoModel": "evil.Model"}, "architectures": ["Evil"], "model_type": "evil"},
    evil__py=f"import os; os.mkdir({MARK!r})".encode(),
)
CASES["model: pickle as its config"] = with_huggingface(PICKLE)
CASES["model: a config of brackets"] = with_huggingface(b"[" * 5_000_000)
CASES["model: 10**9 layers"] = with_huggingface({**LLAMA, "num_hidden_layers": 10**9})
CASES["model: sizes that are text"] = with_huggingface({**LLAMA, "hidden_size": "__import__('os')"})
CASES["model: an index that leaves the folder"] = with_huggingface(
    LLAMA, model__safetensors_index__json=b'{"weight_map": {"model.embed_tokens.weight": "../../secret"}}'
)
CASES["model: an index to an absolute path"] = with_huggingface(
    LLAMA, model__safetensors_index__json=b'{"weight_map": {"model.embed_tokens.weight": "SECRET"}}'
)
CASES["model: pickled weights"] = with_huggingface(LLAMA, model__safetensors=PICKLE, pytorch_model__bin=PICKLE)
CASES["model: safetensors with a header of 2**62"] = with_huggingface(
    LLAMA, model__safetensors=struct.pack("<Q", 1 << 62)
)

# --- logs and reports --------------------------------------------------------------------------------------------------


def with_log(name: str, content: bytes) -> Case:
    def make(place: Place) -> list[str]:
        run_dir = place.copy("run")
        (run_dir / name).write_bytes(content)
        return ["report", str(run_dir), "--out", str(place.folder / "page.html")]

    return make


CASES["log: metrics of brackets"] = with_log("metrics.jsonl", b"[" * 5_000_000)
CASES["log: pickle as metrics"] = with_log("metrics.jsonl", PICKLE)
CASES["log: a step of 10**400"] = with_log("metrics.jsonl", b'{"step": 1' + b"0" * 400 + b', "loss": 1}\n')
CASES["log: a loss of 1e999 and markup"] = with_log(
    "metrics.jsonl",
    b'{"step": 1, "loss": 1e999, "grad_norm": 1, "lr": 1, "tokens": 1, "step_seconds": 1, "</script>": 1}\n',
)
CASES["log: a machine that is a list"] = with_log("machine.json", b"[[]]")

# --- the test ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data"))
    train(load_run(run_file, ["training.steps=2", "optimizer.warmup_steps=0"]), folder / "run")
    (folder / "secret").write_text("nobody may read this")
    return folder


OPENED: list[str] = []
"""Files that were opened since the last case began."""
WATCHED = [False]


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHED[0] and event == "open":
        OPENED.append(str(arguments[0]))


sys.addaudithook(_note_open)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def largest_child() -> int:
    """Return the most memory of any child that has ended, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


@contextmanager
def limits() -> Iterator[None]:
    """In here a case that takes more time than it may is interrupted."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"took more than {MOST_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(3 * MOST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_table_is_as_long_as_it_says() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_does_no_harm(name: str, base: Path, tmp_path: Path) -> None:
    Path("/proc/self/clear_refs").write_text("5")
    memory = peak_bytes()
    before = largest_child()
    words = CASES[name](Place(base, tmp_path))
    out, err = io.StringIO(), io.StringIO()
    OPENED.clear()
    WATCHED[0] = True
    began = time.process_time()
    try:
        with limits(), redirect_stdout(out), redirect_stderr(err):
            # Anything but an error for the user comes out of here as the exception that it is.
            code = run_command_line(words)
    finally:
        WATCHED[0] = False
    assert time.process_time() - began < MOST_S
    # Tests of this process before this one may have had larger children.
    assert peak_bytes() - memory < MOST_BYTES and (largest_child() == before or largest_child() < MOST_BYTES)
    assert not Path(MARK).exists()
    outside = {str(base / "secret"), "/etc/passwd"}
    assert not outside & {os.path.realpath(path) for path in OPENED if path.startswith("/")}
    said = out.getvalue() + err.getvalue()
    assert "Traceback" not in said and "\x1b]" not in said and "nobody may read" not in said
    assert code in (0, 1, 2)
    # Nothing was written beside the folder of the case.
    assert (base / "secret").read_text() == "nobody may read this"
