"""Launch scripts: the facts in them, and what the ranks of a job really see when one runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from fake_slurm import JOB_ID, FakeSlurm
from phalanx.errors import ConfigError, Interrupted
from phalanx.hardware.device_facts import known_devices
from phalanx.hardware.machine import Machine, cores_of, load_machine, machine_names, parse_machine
from phalanx.launch.job_script import (
    REQUEUED,
    STOPPED,
    UNFIT,
    Job,
    complete_job,
    format_walltime,
    launch_script,
    parse_walltime,
)
from phalanx.launch.local_launch import CPU_MASKS
from phalanx.launch.nodes.supervisors import NodePlace, find_place
from phalanx.launch.restart import GIVEN_UP
from phalanx.training.stopping import StopRequest

MACHINE = """\
name: small
about: two devices a node
documents: {}
node: {source: here, devices: 2, device: any, cores_per_task: 3, cpu_masks: ["0x0e", "0xe0"], reserved_cores: [0, 4]}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Slurm as far as a launch script sees it."""
    return FakeSlurm(tmp_path)


def job(nodes: int = 2, **changes: object) -> Job:
    values: dict[str, object] = {
        "directory": Path("/"),
        "run_dir": Path("run"),
        "account": "abc",
        "seconds": 3600,
        **changes,
    }
    return Job(run=Path("run.yaml"), nodes=nodes, **values)  # type: ignore[arg-type]


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("name", machine_names())
def test_scripts_of_every_machine_are_bash_and_ask_for_a_rank_a_device(name: str, nodes: int) -> None:
    machine = load_machine(name)
    for image in (None, "image.sif") if machine.container else (None,):
        script = launch_script(machine, job(nodes, image=image, setup=("source env/bin/activate",)))
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        asked = directives(script)
        assert {f"--nodes={nodes}", f"--ntasks-per-node={machine.node.devices}", "--time=01:00:00"} <= set(asked)
        assert f"--ntasks={nodes * machine.node.devices} " in script
        # sbatch reads no directive after the first line that is not a comment.
        head = script.split("set -eo pipefail")[0]
        assert len(directives(head)) == len(asked)
        assert all(line.startswith("#") or not line for line in head.splitlines())


@pytest.mark.parametrize("name", machine_names())
def test_every_setting_names_a_document_that_is_listed(name: str) -> None:
    machine = load_machine(name)
    container = machine.container.setup if machine.container else ()
    settings = [*machine.slurm.sbatch, *machine.slurm.srun, *machine.setup, *machine.environment, *container]
    sources = [setting.source for setting in settings] + [partition.source for partition in machine.slurm.partitions]
    for source in sources:
        tags = re.findall(r"\[(\w+)\]", source)
        assert tags and set(tags) <= set(machine.documents), source
    assert machine.node.device in {facts.name for _, facts in known_devices()}
    assert all(setting.reason.endswith(".") for setting in settings)


@pytest.mark.parametrize("name", machine_names())
def test_nothing_concerns_nvlink_multicast_and_no_name_is_one_of_the_known_misspellings(name: str) -> None:
    for nodes in (1, 2):
        names = re.findall(r"^export (\w+)=", launch_script(load_machine(name), job(nodes)), re.MULTILINE)
        assert not [found for found in names if "NVLS" in found or "MULTICAST" in found or "MNNVL" in found]
        assert not {"FI_CXI_RDV_PROTO", "MIOPEN_USER_DB"} & set(names)
        assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["frontier", "lumi"])
def test_masks_are_the_usable_cores_of_each_gcds_l3_region(name: str) -> None:
    masks = [cores_of(mask) for mask in load_machine(name).node.cpu_masks]
    # The first core of each, as LUMI documents them for --cpu-bind=map_cpu.
    assert [cores[0] for cores in masks] == [49, 57, 17, 25, 1, 9, 33, 41]
    # "hardware threads 048-055 | GPU 0" and so on in the Frontier user guide.
    assert [{core // 8 for core in cores} for cores in masks] == [{6}, {7}, {2}, {3}, {0}, {1}, {4}, {5}]
    reserved = set(range(0, 64, 8))
    assert all(len(cores) == 7 for cores in masks)
    assert sorted(core for cores in masks for core in cores) == sorted(set(range(64)) - reserved)


def test_frontier_asks_for_what_olcf_documents() -> None:
    frontier = load_machine("frontier")
    script = launch_script(frontier, job(2))
    assert {"--account=abc", "--partition=batch", "--network=disable_rdzv_get", "--requeue"} <= set(directives(script))
    assert "--gpus-per-task=1" in script and "--gpu-bind=closest" in script and "--cpus-per-task=7" in script
    assert script.index("module load rocm/") < script.index("module load rccl-net-plugin")
    exports = dict(re.findall(r'^export (\w+)="(.*)"$', script, re.MULTILINE))
    assert exports["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1,hsn2,hsn3"
    assert exports["FI_CXI_RDZV_PROTO"] == "alt_read" and exports["FI_MR_CACHE_MONITOR"] != "memhooks"
    assert exports["NCCL_NET"] == "OFI"
    assert 'export NCCL_NET="Socket"' in launch_script(frontier, job(1))


def test_the_signal_is_one_that_training_answers_with_a_checkpoint() -> None:
    script = launch_script(load_machine("frontier"), job())
    (option,) = [option for option in directives(script) if option.startswith("--signal=")]
    name = option.removeprefix("--signal=").partition("@")[0]
    assert ":" not in name, "a signal to the batch shell does not reach the ranks"
    number = signal.Signals[f"SIG{name}"]
    before = signal.getsignal(number)
    with StopRequest():
        assert signal.getsignal(number) != before
    assert Interrupted("", number).exit_code == STOPPED


@pytest.mark.parametrize("name", ["frontier", "lumi", "dgx-h100"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_see_their_numbers_and_the_meeting_point(name: str, nodes: int, slurm: FakeSlurm) -> None:
    devices = load_machine(name).node.devices
    done = slurm.run(launch_script(load_machine(name), job(nodes, directory=slurm.folder)), nodes)
    assert done.returncode == 0, done.stderr
    seen = slurm.seen()
    assert [(s.ranks.rank, s.ranks.local_rank) for s in seen] == [(r, r % devices) for r in range(nodes * devices)]
    for rank in seen:
        assert (rank.ranks.world_size, rank.ranks.ranks_per_node) == (nodes * devices, devices)
        assert rank.environment["MASTER_ADDR"] == "node001"
        assert rank.environment["MASTER_PORT"] == str(10_000 + JOB_ID % 20_000)
        assert rank.arguments == ["train", "run.yaml"] and rank.directory == str(slurm.folder)
        assert rank.environment["OMP_NUM_THREADS"] == str(load_machine(name).node.cores_per_task)
    if name != "dgx-h100":
        folder = f"/tmp/{slurm.user}-miopen{'-cache' if name == 'lumi' else ''}-{JOB_ID}"
        assert {rank.environment["MIOPEN_USER_DB_PATH"] for rank in seen} == {folder}
        assert {rank.environment["MIOPEN_CUSTOM_CACHE_DIR"] for rank in seen} == {folder}
        assert slurm.made_folders() == [folder] * nodes


def test_ranks_really_meet(slurm: FakeSlurm) -> None:
    slurm.install_meeting_program()
    done = slurm.run(
        launch_script(parse_machine(MACHINE, "small.yaml"), job(1, directory=slurm.folder)), 1, "localhost"
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["rank 0 of 2: sum 1", "rank 1 of 2: sum 1"], done.stderr


def test_leftovers_of_torchrun_do_not_reach_the_ranks(slurm: FakeSlurm) -> None:
    script = launch_script(parse_machine(MACHINE, "small.yaml"), job(2, directory=slurm.folder))
    slurm.run(script, 2, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="elsewhere")
    assert [rank.ranks.rank for rank in slurm.seen()] == [0, 1, 2, 3]
    assert {rank.environment["MASTER_ADDR"] for rank in slurm.seen()} == {"node001"}


def test_a_container_gets_the_users_setup_and_the_same_ranks(slurm: FakeSlurm) -> None:
    wanted = job(2, directory=slurm.folder, image="my image.sif", setup=("export INSIDE='a b'", "cd /"))
    slurm.install_container()
    done = slurm.run(launch_script(load_machine("lumi"), wanted), 2)
    assert done.returncode == 0, done.stderr
    seen = slurm.seen()
    assert [rank.ranks.rank for rank in seen] == list(range(16))
    for rank in seen:
        assert (rank.environment["INSIDE"], rank.environment["CONTAINER"]) == ("a b", "my image.sif")
        assert rank.directory == "/" and rank.arguments == ["train", "run.yaml"]
    assert "load lumi-aif-singularity-bindings" in slurm.modules()


NASTY = ("training.run_dir=it's", 'a.b="x y"', "c.d=$(touch pwned) `touch pwned`", "e.f=line\nbreak", "g.h=$HOME;*")


def test_whatever_the_user_writes_arrives_as_it_is(slurm: FakeSlurm) -> None:
    strange = slurm.folder / "a 'strange' $folder"
    strange.mkdir()
    text = (
        MACHINE
        + "environment:\n  - {name: ODD, value: 'a\"b`touch pwned`$(touch pwned)\\\\ ${USER}$', reason: R., source: s}\n"
    )
    wanted = Job(Path("it's a run.yaml"), 1, strange, Path("run"), NASTY, seconds=600)
    done = slurm.run(launch_script(parse_machine(text, "small.yaml"), wanted), 1)
    assert done.returncode == 0, done.stderr
    for rank in slurm.seen():
        assert rank.arguments == ["train", "it's a run.yaml", *NASTY]
        assert rank.directory == str(strange)
        assert rank.environment["ODD"] == f'a"b`touch pwned`$(touch pwned)\\\\ {slurm.user}$'
    assert not list(slurm.folder.rglob("pwned"))


@pytest.mark.parametrize(
    ("code", "requeue", "asked"),
    [(code, True, True) for code in REQUEUED] + [(STOPPED, False, False), (0, True, False), (1, True, False)],
)
def test_only_a_run_that_stopped_in_good_order_waits_again(
    code: int, requeue: bool, asked: bool, slurm: FakeSlurm
) -> None:
    text = MACHINE + f"stop: {{requeue: {str(requeue).lower()}}}\n"
    script = launch_script(parse_machine(text, "small.yaml"), job(1, directory=slurm.folder))
    assert f"--{'' if requeue else 'no-'}requeue" in directives(script)
    done = slurm.run(script, 1, RANK_EXIT=str(code))
    assert done.returncode == code
    assert slurm.requeued() == ([str(JOB_ID)] if asked else [])


@pytest.mark.parametrize(("queued_before", "saves", "code"), [(0, 0, STOPPED), (1, 1, STOPPED), (1, 0, GIVEN_UP)])
def test_a_job_that_was_queued_again_and_came_no_further_is_given_up(
    queued_before: int, saves: int, code: int, slurm: FakeSlurm
) -> None:
    wanted = job(1, directory=slurm.folder, run_dir=Path("run"))
    script = launch_script(parse_machine(MACHINE + "stop: {requeue: true}\n", "small.yaml"), wanted)
    done = slurm.run(script, 1, RANK_EXIT=str(STOPPED), SAVES=str(saves), SLURM_RESTART_COUNT=str(queued_before))
    assert done.returncode == code, done.stderr
    assert slurm.requeued() == ([str(JOB_ID)] if code == STOPPED else [])
    assert ("given up" in done.stderr) == (code == GIVEN_UP)


@pytest.mark.parametrize(
    ("codes", "saves", "code", "attempts"),
    [
        ("137,0", 0, 0, 2),
        ("139,134,143", 0, STOPPED, 3),
        # Two restarts in vain are enough, but those that come further are not counted.
        ("137", 0, GIVEN_UP, 3),
        ("137", 2, GIVEN_UP, 4),
        # What a rank said itself, or the user must mend, would be the same again.
        ("1", 0, 1, 1),
        ("2", 0, 2, 1),
    ],
)
def test_after_a_killed_rank_all_begin_again_until_that_is_in_vain(
    codes: str, saves: int, code: int, attempts: int, slurm: FakeSlurm
) -> None:
    wanted = job(1, directory=slurm.folder, run_dir=Path("run"), restarts=2, backoff_s=0.0)
    script = launch_script(parse_machine(MACHINE + "stop: {requeue: true}\n", "small.yaml"), wanted)
    done = slurm.run(script, 1, RANK_EXIT=codes, SAVES=str(saves))
    assert (done.returncode, slurm.attempts()) == (code, attempts), done.stderr
    assert slurm.requeued() == ([str(JOB_ID)] if code == STOPPED else [])
    assert ("given up" in done.stderr) == (code == GIVEN_UP)


@pytest.mark.parametrize(("first", "code", "attempts"), [("0", 0, 1), ("93", GIVEN_UP, 1), ("137,143", STOPPED, 2)])
def test_the_first_supervisors_code_counts_and_not_that_of_one_that_was_left_out(
    first: str, code: int, attempts: int, slurm: FakeSlurm
) -> None:
    wanted = job(1, directory=slurm.folder, run_dir=Path("run"), restarts=2, backoff_s=0.0)
    script = launch_script(parse_machine(MACHINE + "stop: {requeue: true}\n", "small.yaml"), wanted)
    done = slurm.run(script, 1, RANK_EXIT="137", FIRST_EXIT=first)
    assert (done.returncode, slurm.attempts()) == (code, attempts), done.stderr
    assert slurm.requeued() == ([str(JOB_ID)] if code == STOPPED else [])


@pytest.mark.parametrize(
    ("named", "saves", "sbatch_exit", "submits", "code", "attempts"),
    [
        # A node that fails twice in a row is left out; ranks of others then only lost theirs.
        ("node002,node002+node001", 0, 0, True, 137, 2),
        # Another each time, or a newer checkpoint in between: the same nodes may go on.
        ("node002,node001,node002", 0, 0, False, GIVEN_UP, 4),
        ("node002,node002", 2, 0, True, 137, 3),
        ("node002", 0, 0, False, GIVEN_UP, 4),
        # Not a node of this job: what stands in the run folder is not taken at its word.
        ("node9,node9", 0, 0, False, GIVEN_UP, 4),
        # A site where jobs may not submit.
        ("node002,node002", 0, 1, True, GIVEN_UP, 4),
    ],
)
def test_a_node_that_fails_twice_in_a_row_is_left_out_of_the_job_that_goes_on(
    named: str, saves: int, sbatch_exit: int, submits: bool, code: int, attempts: int, slurm: FakeSlurm
) -> None:
    if saves:
        # A newer checkpoint comes of the first two attempts, so the first report counts no more.
        named = f"{named},node002"
    wanted = job(2, directory=slurm.folder, run_dir=Path("run"), restarts=3, backoff_s=0.0)
    script = launch_script(parse_machine(MACHINE, "small.yaml"), wanted)
    done = slurm.run(script, 2, RANK_EXIT="137", NAMES=named, SAVES=str(saves), SBATCH_EXIT=str(sbatch_exit))
    assert (done.returncode, slurm.attempts()) == (code, attempts), done.stderr
    again = ["--exclude=node002", f"--chdir={slurm.folder}", str(slurm.folder / "script.sbatch"), "node002"]
    assert all(words == again for words in slurm.submitted()) and bool(slurm.submitted()) == submits
    assert ("a new job goes on without node002" in done.stderr) == (submits and not sbatch_exit)


@pytest.mark.parametrize(
    ("name", "mask"), [("frontier", "0xfefefefefefefefe"), ("lumi", "0xfefefefefefefefe"), ("dgx-h100", "")]
)
def test_a_job_that_begins_again_has_a_supervisor_on_each_node(name: str, mask: str, slurm: FakeSlurm) -> None:
    machine = load_machine(name)
    devices, nodes = machine.node.devices, 2
    wanted = job(nodes, directory=slurm.folder, run_dir=Path("run"), restarts=2, overrides=("training.steps=5",))
    script = launch_script(machine, wanted)
    done = slurm.run(script, nodes)
    assert done.returncode == 0, done.stderr
    seen = slurm.seen()
    assert len(seen) == nodes
    for node, supervisor in enumerate(seen):
        assert supervisor.arguments == ["train", "run.yaml", "--nproc", str(devices), "training.steps=5"]
        with mock.patch.dict(os.environ, supervisor.environment, clear=True):
            assert find_place(None, None, None) == NodePlace(nodes, node, "node001", 10_000 + JOB_ID % 20_000)
        masks = supervisor.environment.get(CPU_MASKS, "")
        assert masks == ",".join(machine.node.cpu_masks)
    assert f"--cpus-per-task={devices * machine.node.cores_per_task}\n" in script
    assert f"--cpu-bind={f'mask_cpu:{mask}' if mask else 'cores'}\n" in script
    # What binds a device to each task would leave all ranks of a node with one.
    assert "--gpu-bind" not in script and ("--gpus-per-task=8" in script) == (name == "frontier")


@pytest.mark.parametrize(("saves", "code"), [(0, GIVEN_UP), (1, 137)])
def test_a_job_without_a_node_leaves_out_another_only_after_progress(saves: int, code: int, slurm: FakeSlurm) -> None:
    wanted = job(2, directory=slurm.folder, run_dir=Path("run"), restarts=3, backoff_s=0.0)
    script = launch_script(parse_machine(MACHINE, "small.yaml"), wanted)
    done = slurm.run(script, 2, words=["node009"], RANK_EXIT="137", NAMES="node002,node002,node002", SAVES=str(saves))
    assert done.returncode == code, done.stderr
    excluded = [words[0] for words in slurm.submitted()]
    assert excluded == (["--exclude=node002,node009"] if saves else [])
    assert ("it is not the node's fault" in done.stderr) == (not saves)


@pytest.mark.parametrize("replans", [False, True])
def test_slurm_ends_no_job_that_goes_on_without_a_node(replans: bool) -> None:
    machine = parse_machine(MACHINE, "small.yaml")
    text = launch_script(machine, job(2, run_dir=Path("run"), restarts=2, replans=replans))
    assert ("#SBATCH --no-kill" in text, "--wait=0 --no-kill" in text) == (replans, replans)
    # Where Slurm starts the ranks itself, they need each other.
    assert "--no-kill" not in launch_script(machine, job(2, run_dir=Path("run"), restarts=0, replans=replans))


def test_a_machine_whose_jobs_are_not_queued_again_submits_none(slurm: FakeSlurm) -> None:
    wanted = job(2, directory=slurm.folder, run_dir=Path("run"), restarts=3, backoff_s=0.0)
    script = launch_script(parse_machine(MACHINE + "stop: {requeue: false}\n", "small.yaml"), wanted)
    done = slurm.run(script, 2, RANK_EXIT="137", NAMES="node002,node002")
    assert (done.returncode, slurm.attempts(), slurm.submitted()) == (GIVEN_UP, 4, [])


def test_a_cancelled_job_does_not_begin_again(slurm: FakeSlurm) -> None:
    wanted = job(1, directory=slurm.folder, run_dir=Path("run"), restarts=2, backoff_s=0.0)
    shell = slurm.start(
        launch_script(parse_machine(MACHINE, "small.yaml"), wanted), 1, RANK_EXIT="137", RANK_WAITS="yes"
    )
    slurm.wait_for_ranks(1)
    shell.send_signal(signal.SIGTERM)
    slurm.let_ranks_end()
    shell.communicate(timeout=20)
    assert shell.returncode == 137 and slurm.attempts() == 1


@pytest.mark.parametrize(("save_s", "lead_s"), [(None, 300), (20.0, 300), (400.5, 861)])
def test_the_signal_leaves_time_for_the_slowest_checkpoint_so_far(save_s: float | None, lead_s: int) -> None:
    script = launch_script(parse_machine(MACHINE, "small.yaml"), job(1, save_seconds=save_s))
    assert f"--signal=TERM@{lead_s}" in directives(script) and f"--wait={lead_s}" in script
    with pytest.raises(ConfigError, match=f"told to stop {lead_s} s before the end"):
        launch_script(parse_machine(MACHINE, "small.yaml"), job(1, save_seconds=save_s, seconds=lead_s))


@pytest.mark.parametrize(("code", "trains"), [(0, True), (UNFIT, False), (1, True)])
def test_ranks_are_examined_first_and_a_job_that_is_unfit_ends(code: int, trains: bool, slurm: FakeSlurm) -> None:
    examined = job(2, directory=slurm.folder, examined_as="small.yaml")
    done = slurm.run(launch_script(parse_machine(MACHINE, "small.yaml"), examined), 2, DOCTOR_EXIT=str(code))
    assert slurm.examined() == [["doctor", "--cluster", "small.yaml"]] * 4
    assert done.returncode == (0 if trains else UNFIT) and len(slurm.seen()) == (4 if trains else 0)
    assert ("training starts all the same" in done.stderr) == (code == 1)


def test_a_container_is_examined_from_inside(slurm: FakeSlurm) -> None:
    slurm.install_container()
    wanted = job(1, directory=slurm.folder, image="my image.sif", examined_as="lumi")
    done = slurm.run(launch_script(load_machine("lumi"), wanted), 1)
    assert done.returncode == 0, done.stderr
    assert slurm.examined() == [["doctor", "--cluster", "lumi"]] * 8


def test_a_cancelled_job_lets_its_ranks_save_and_stays_cancelled(slurm: FakeSlurm) -> None:
    script = launch_script(parse_machine(MACHINE, "small.yaml"), job(1, directory=slurm.folder))
    shell = slurm.start(script, 1, RANK_EXIT=str(STOPPED), RANK_WAITS="yes")
    slurm.wait_for_ranks(2)
    shell.send_signal(signal.SIGTERM)
    slurm.let_ranks_end()
    shell.communicate(timeout=20)
    assert shell.returncode == STOPPED and slurm.requeued() == []
    assert len(slurm.seen()) == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:00:00", 7200),
        ("48:00:00", 172800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("0-00:00:59", 59),
    ],
)
def test_wall_times(text: str, seconds: int) -> None:
    assert parse_walltime(text) == seconds
    assert parse_walltime(format_walltime(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "2h", "1:2:3:4", "-5", "2:00", "1:60:00", "0", "0:00:00", "1-", "٣"])
def test_wrong_wall_times(text: str) -> None:
    with pytest.raises(ConfigError, match="--time"):
        parse_walltime(text)


@pytest.mark.parametrize(
    ("machine", "nodes", "partition", "hours"),
    [
        ("frontier", 1, None, 2),
        ("frontier", 91, None, 2),
        ("frontier", 92, None, 6),
        ("frontier", 183, None, 6),
        ("frontier", 184, None, 12),
        ("frontier", 9472, None, 12),
        ("frontier", 64, "extended", 24),
        ("lumi", 1024, None, 48),
        ("lumi", 4, "small-g", 72),
        ("lumi", 32, "dev-g", 3),
    ],
)
def test_the_longest_time_follows_from_the_size(machine: str, nodes: int, partition: str | None, hours: int) -> None:
    completed = complete_job(load_machine(machine), job(nodes, partition=partition, seconds=None))
    assert completed.seconds == hours * 3600
    with pytest.raises(ConfigError, match=f"nearest legal: --time {hours:02d}:00:00"):
        complete_job(load_machine(machine), job(nodes, partition=partition, seconds=hours * 3600 + 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes 0: a job has at least 1 node"),
        ({"nodes": 9473}, r"--nodes 9473 is more than partition batch has.*\nnearest legal: --nodes 9472"),
        ({"account": None}, "give --account PROJECT"),
        ({"account": "a b"}, "--account a b is not a name"),
        ({"partition": "x\n#SBATCH --y"}, "is not a name"),
        ({"partition": "other", "seconds": None}, "limits of partition other are not known: give --time"),
        ({"image": "x.sif"}, "frontier has no container section"),
        ({"setup": ("a\nb",)}, "--setup takes one line"),
        ({"seconds": 300}, "leaves no time to train"),
    ],
)
def test_jobs_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch_script(load_machine("frontier"), job(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices: 2", "devices: 0", "own.yaml: node.devices=0"),
        ("devices: 2", "devices: 3", "cpu_masks has 2 masks for 3 devices"),
        ('"0xe0"', '"0x1e"', r"cpu_masks\[1\]=0x1e has 4 cores, cores_per_task=3"),
        ('"0xe0"', '"0x2a"', r"cpu_masks\[1\]=0x2a has core 1, which is in cpu_masks\[0\] too"),
        ('"0xe0"', '"0xd0"', r"has core 4, which is a reserved core"),
        ('"0xe0"', '"224"', r"node.cpu_masks.1=\"224\""),
        ("name: small", "slurm: {srun: [{option: --a, per_node: b, reason: R., source: s}]}\nname: small", "per_node"),
        ("about:", "abuot:", "about: field required\nown.yaml: abuot is not a field"),
        ("name: small", "name: [", "own.yaml is not valid YAML"),
        ("name: small", "2026-11-23: small", "own.yaml holds what no field of a description can be: keys must be str"),
        ("name: small", "name: &a [*a]", r"own.yaml is not valid YAML: aliases \(\*name\) have no place"),
        ("name: small", "name: 5", "own.yaml: name=5"),
    ],
)
def test_mistakes_in_a_description(old: str, new: str, message: str) -> None:
    assert isinstance(parse_machine(MACHINE, "own.yaml"), Machine)
    assert old in MACHINE
    with pytest.raises(ConfigError, match=message):
        parse_machine(MACHINE.replace(old, new), "own.yaml")
