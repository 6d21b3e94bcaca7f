"""`phalanx launch`: what it writes, submits and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import Call

RUN = """\
model: {n_layers: 2, d_model: 64, n_heads: 8, d_ff: 128, vocab_size: 256, max_positions: 64}
data: {sources: [data/a], sequence_length: 64}
layout: {global_batch: 48, microbatch: 1}
optimizer: {lr: 1e-3}
training: {steps: 10}
"""
OWN = """\
name: own
about: a machine of one's own
documents: {}
node: {source: me, devices: 3, device: any, cores_per_task: 1}
"""
FRONTIER = ("--cluster", "frontier", "--account", "abc123")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file, in which the command runs; no Slurm on PATH."""
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def fake_sbatch(folder: Path, lines: str) -> None:
    path = folder / "bin" / "sbatch"
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in ("run.yaml", "bin"))


def test_prints_the_script(call: Call, folder: Path) -> None:
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "2", "training.steps=20", "layout.tp=2")
    assert (outcome.code, outcome.err, files(folder)) == (0, "", [])
    assert outcome.out.startswith("#!/bin/bash\n") and f"\ncd -- {folder}\n" in outcome.out
    assert "\ntrain=(phalanx train run.yaml --nproc 8 training.steps=20 layout.tp=2)\n" in outcome.out
    assert "#SBATCH --time=02:00:00\n" in outcome.out


def test_a_run_that_chooses_its_checkpoints_is_told_how_often_nodes_fail(call: Call) -> None:
    command = ("launch", "run.yaml", "--cluster", "dgx-h100", "--time", "60", "--nodes", "1")
    assert "cluster.mtbf_hours" not in call(*command).out
    chooses = (*command, "checkpoint.every=auto")
    assert (
        "train=(phalanx train run.yaml --nproc 8 cluster.mtbf_hours=6300 checkpoint.every=auto)" in call(*chooses).out
    )
    assert "=6300" not in call(*chooses, "cluster.mtbf_hours=50").out


def test_writes_the_script(call: Call, folder: Path) -> None:
    printed = call("launch", "run.yaml", *FRONTIER, "--nodes", "2", "--time", "1:00:00")
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "2", "--time", "60", "--out", "jobs/a.sbatch")
    assert outcome.code == 0
    assert outcome.out == (
        "jobs/a.sbatch: 16 ranks on 2 nodes of frontier for 01:00:00, dp_shard=16 reshard_after_forward=True\n"
    )
    assert (folder / "jobs" / "a.sbatch").read_text() == printed.out


def test_json(call: Call) -> None:
    arguments = ("launch", "run.yaml", *FRONTIER, "--nodes", "2", "--partition", "extended")
    facts = json.loads(call(*arguments, "--json").out)
    assert facts["text"] == call(*arguments).out
    del facts["text"]
    assert facts == {
        "cluster": "frontier",
        "nodes": 2,
        "world_size": 16,
        "layout": "dp_shard=16 reshard_after_forward=True",
        "partition": "extended",
        "time_s": 86400,
        "script": None,
        "job_id": None,
    }


@pytest.mark.parametrize(("said", "job_id"), [("123", "123"), ("456;frontier", "456")])
def test_submits(said: str, job_id: str, call: Call, folder: Path) -> None:
    fake_sbatch(folder, f'echo "$@" > arguments; /bin/cat "$2" > received; echo "{said}"')
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "1", "--submit", "--json")
    facts = json.loads(outcome.out)
    assert (outcome.code, facts["job_id"], facts["script"], facts["world_size"]) == (
        0,
        job_id,
        "run-frontier.sbatch",
        8,
    )
    assert (folder / "arguments").read_text() == f"--parsable {folder}/run-frontier.sbatch\n"
    assert (folder / "received").read_text() == facts["text"] == (folder / "run-frontier.sbatch").read_text()
    words = call("launch", "run.yaml", *FRONTIER, "--nodes", "1", "--submit", "--out", "b.sbatch").out
    assert words.startswith("b.sbatch: 8 ranks") and words.endswith(f"submitted as job {job_id}\n")


def test_what_sbatch_refuses(call: Call, folder: Path) -> None:
    fake_sbatch(folder, "echo 'sbatch: error: Invalid account' >&2; exit 1")
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "1", "--submit")
    message = "error: sbatch refused run-frontier.sbatch: sbatch: error: Invalid account\n"
    assert (outcome.code, outcome.out, outcome.err) == (1, "", message)


def test_no_sbatch(call: Call, folder: Path) -> None:
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "1", "--submit")
    assert (outcome.code, outcome.out, files(folder)) == (1, "", [])
    assert outcome.err.startswith("error: --submit needs sbatch, which is not on PATH")


def test_a_machine_of_ones_own(call: Call, folder: Path) -> None:
    (folder / "own.yaml").write_text(OWN)
    outcome = call("launch", "run.yaml", "--cluster", "own.yaml", "--nodes", "4", "--time", "60", "--json")
    assert json.loads(outcome.out)["world_size"] == 12
    assert "--account" not in outcome.out and "--partition" not in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--cluster", "fronteir", "--nodes", "1"],
            "--cluster fronteir is not known; give one of dgx-h100, frontier, lumi, mi300x, or the path of a .yaml file\n"
            "       nearest: frontier",
        ),
        (["--cluster", "./none.yaml", "--nodes", "1"], "--cluster none.yaml cannot be read: No such file or directory"),
        ([*FRONTIER, "--nodes", "0"], "--nodes 0: a job has at least 1 node"),
        ([*FRONTIER, "--nodes", "-1"], "--nodes -1: a job has at least 1 node"),
        (["--cluster", "lumi", "--nodes", "1"], "lumi runs no job without an account: give --account PROJECT"),
        ([*FRONTIER, "--nodes", "1", "--time", "2:00"], "--time 2:00 would be minutes and seconds to Slurm"),
        ([*FRONTIER, "--nodes", "5"], "layout.global_batch=48 samples is not a multiple of"),
        (
            [*FRONTIER, "--nodes", "1", "layout.tp=3"],
            "layout.tp=3 does not divide the world size 8\n       nearest legal: tp=2",
        ),
        ([*FRONTIER, "--nodes", "4", "layout.tp=32"], "layout.tp=32"),
        ([*FRONTIER, "--nodes", "1", "layout.tpp=2"], "layout.tpp=2: there is no such field"),
        ([*FRONTIER], "missing option '--nodes'"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    arguments: list[str], message: str, call: Call, folder: Path
) -> None:
    fake_sbatch(folder, "echo 1")
    outcome = call("launch", "run.yaml", *arguments, "--out", "a.sbatch", "--submit")
    assert (outcome.code, outcome.out, files(folder)) == (2, "", [])
    assert outcome.err.startswith(f"error: {message}")


def test_a_batch_that_does_not_divide_names_the_nearest(call: Call) -> None:
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "5")
    assert (outcome.code, outcome.err.splitlines()[-1].strip()) == (
        2,
        "nearest legal, but another experiment: global_batch=40 or 80",
    )


def test_tensor_parallel_groups_stay_in_the_nodes_of_the_machine(call: Call, folder: Path) -> None:
    (folder / "own.yaml").write_text(OWN)
    arguments = ("launch", "run.yaml", "--cluster", "own.yaml", "--nodes", "2", "--time", "60", "layout.tp=2")
    outcome = call(*arguments)
    assert outcome.code == 2 and "layout.tp=2 groups do not fit into nodes of 3 devices" in outcome.err
    assert call(*arguments, "layout.tp_across_nodes=true").code == 0


def test_a_missing_run_file(call: Call) -> None:
    outcome = call("launch", "other.yaml", *FRONTIER, "--nodes", "1")
    assert (outcome.code, outcome.err) == (2, "error: run file other.yaml does not exist\n       nearest: run.yaml\n")


def test_a_script_that_cannot_be_written_is_named(call: Call, folder: Path) -> None:
    (folder / "taken").write_text("a file")
    outcome = call("launch", "run.yaml", *FRONTIER, "--nodes", "1", "--out", "taken/a.sbatch")
    message = "error: cannot write taken/a.sbatch: File exists; name another file\n"
    assert (outcome.code, outcome.out, outcome.err) == (1, "", message)
