"""Writes the text of the sbatch script that trains a job on a machine. Pure functions: nothing is run or stored here.

A script and the program must agree: ranks read their numbers from Slurm's variables of the training step, and the
rendezvous from MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.hardware.machine import Line, Machine, Option, Partition
from phalanx.launch.faults import FAILED_NODES
from phalanx.launch.local_launch import CPU_MASKS
from phalanx.launch.restart import END_FILE, GIVEN_UP

STOPPED = 143
"""Exit code of `phalanx train` after SIGTERM, once its checkpoint is written: 128 + the signal's number."""
REQUEUED = (STOPPED, 128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
"""Exit codes of `phalanx train` after the signals by which a scheduler warns of a job's end."""

UNFIT = 3
"""Exit code of `phalanx doctor` where training would fail or compute something wrong."""

KILLED = tuple(128 + number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV))
"""Exit codes of a step in which a signal ended a rank: no fault of the run file, so the ranks may begin again."""

_END_S = 60
"""Seconds for the step under way and the end of the processes."""
_PREFLIGHT_MINUTES = 10
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# Below the ports that Linux hands out by itself (32768 and up), above those that need privileges.
_FIRST_PORT, _PORTS = 10_000, 20_000
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,-]*")
_EXPANDED = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})")


@dataclass(frozen=True)
class Job:
    """A run to train, and the nodes and time to ask for."""

    run: Path
    """Run file or run folder, relative to `directory` or absolute."""
    nodes: int
    directory: Path
    """Absolute folder in which training starts."""
    run_dir: Path
    """The run's own folder, relative to `directory` or absolute."""
    overrides: tuple[str, ...] = ()
    """`section.field=value` words for `phalanx train`."""
    seconds: int | None = None
    """Wall time; None takes the longest that the partition allows."""
    account: str | None = None
    partition: str | None = None
    """None takes the machine's usual one."""
    setup: tuple[str, ...] = ()
    """Shell lines of the user, run before training, inside the container if there is one."""
    image: str | None = None
    """Container image."""
    restarts: int = 0
    """Times in a row that ranks may begin again without a newer checkpoint."""
    backoff_s: float = 5.0
    """Seconds before they do."""
    replans: bool = False
    """Whether the run goes on without a node that is lost, in another layout."""
    save_seconds: float | None = None
    """Longest time that a checkpoint of this run took so far; None where none was measured."""
    examined_as: str | None = None
    """Machine name for `phalanx doctor`, which examines all ranks before they train; None leaves the examination out."""

    @property
    def supervised(self) -> bool:
        """Whether a supervisor on each node starts the ranks there, and again after a fault, in place of Slurm."""
        return self.restarts > 0


def parse_walltime(text: str) -> int:
    """Return the seconds of a wall time written H:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS, or as minutes.

    Raises ConfigError for anything else, and for H:MM, which Slurm would read as minutes and seconds.
    """
    if re.fullmatch(r"[0-9]{1,6}", text):
        seconds = int(text) * 60
    elif match := re.fullmatch(r"(?:([0-9]{1,3})-)?([0-9]{1,4})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?", text):
        days, hours, minutes, rest = (None if part is None else int(part) for part in match.groups())
        if days is None and rest is None:
            raise ConfigError(f"--time {text} would be minutes and seconds to Slurm; write {text}:00 or 0:{text}")
        if (minutes or 0) > 59 or (rest or 0) > 59:
            raise ConfigError(f"--time {text} has more than 59 minutes or seconds; write H:MM:SS")
        assert hours is not None
        seconds = (((days or 0) * 24 + hours) * 60 + (minutes or 0)) * 60 + (rest or 0)
    else:
        raise ConfigError(f"--time {text} is not a wall time; write H:MM:SS, D-HH:MM:SS or a number of minutes")
    if not seconds:
        raise ConfigError(f"--time {text} is no time at all")
    return seconds


def format_walltime(seconds: int) -> str:
    """Return seconds as HH:MM:SS; the hours may exceed 24."""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def complete_job(machine: Machine, job: Job) -> Job:
    """Return `job` with partition and wall time filled in. Raises ConfigError where `machine` cannot run it."""
    if job.nodes < 1:
        raise ConfigError(f"--nodes {job.nodes}: a job has at least 1 node")
    for option, value in (("--account", job.account), ("--partition", job.partition)):
        # They stand in #SBATCH lines, in which nothing can be quoted.
        if value is not None and not _NAMES.fullmatch(value):
            raise ConfigError(f"{option} {value} is not a name: letters, digits and . _ - only")
    if job.account is None and machine.job_slurm.account_needed:
        raise ConfigError(f"{machine.name} runs no job without an account: give --account PROJECT")
    if job.image is not None and machine.container is None:
        raise ConfigError(f"--image {job.image}: the description of {machine.name} has no container section")
    for line in job.setup:
        if "\n" in line or "\r" in line:
            raise ConfigError("--setup takes one line of shell; give it once for each line")
    known = machine.job_slurm.partitions
    if job.partition is None:
        partition = known[0] if known else None
    else:
        partition = next((partition for partition in known if partition.name == job.partition), None)
    longest = None if partition is None else _longest_seconds(partition, job.nodes)
    seconds = job.seconds if job.seconds is not None else longest
    if seconds is None:
        where = f"partition {job.partition}" if job.partition else machine.name
        raise ConfigError(f"the limits of {where} are not known: give --time H:MM:SS")
    if longest is not None and seconds > longest:
        assert partition is not None
        raise ConfigError(
            f"--time {format_walltime(seconds)} is more than {partition.name} allows {job.nodes} nodes\n"
            f"nearest legal: --time {format_walltime(longest)} ({partition.source})"
        )
    if seconds <= (stop_s := stop_seconds(machine, job)):
        raise ConfigError(
            f"--time {format_walltime(seconds)} leaves no time to train: the run is told to stop {stop_s} s before the end"
        )
    name = job.partition if partition is None else partition.name
    return replace(job, partition=name, seconds=seconds)


def stop_seconds(machine: Machine, job: Job) -> int:
    """Return the seconds before the end of `job` at which its ranks are told to save and stop.

    Those of the machine, or more where checkpoints of this run took long: twice as long, and the end of the processes.
    """
    measured = 0 if job.save_seconds is None else math.ceil(2.0 * job.save_seconds) + _END_S
    return max(machine.stop.seconds_before_end, measured)


def launch_script(machine: Machine, job: Job) -> str:
    """Return the sbatch script that trains `job` on `machine`. Raises ConfigError as `complete_job` does."""
    job = complete_job(machine, job)
    container = () if machine.container is None else machine.container.setup
    parts = (
        _header_lines(machine, job),
        ["set -eo pipefail", f"cd -- {shlex.quote(str(job.directory))}"],
        # The machine's own lines of shell, and the user's unless they run inside a container.
        [*_reasoned_lines(machine.setup), *(job.setup if job.image is None else _reasoned_lines(container))],
        _environment_lines(machine, job),
        [_MEETING_POINT],
        _folder_lines(machine, job),
        _command_lines(machine, job),
        [] if job.examined_as is None else [_PREFLIGHT],
        [*_training_lines(machine, job), *([_REQUEUE] if machine.stop.requeue else []), 'exit "$code"'],
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


@dataclass(frozen=True)
class JobArray:
    """Equal jobs that are submitted together, each with a folder of its own."""

    name: str
    """Name of the jobs, by which they are found in the queue."""
    command: tuple[str, ...]
    """Command of every rank, to which the job's folder is added."""
    folders: Path
    """File that names the folder of each job, a line a job."""
    tasks: int
    """Jobs of the array."""
    logs: Path
    """Folder of what the jobs write outside their own folders."""


ARRAY_END = "ended"
"""File that a job of an array leaves in its folder: exit code and seconds of its ranks."""


def array_script(machine: Machine, job: Job, array: JobArray) -> str:
    """Return the sbatch script of an array of jobs, each with the nodes and the time of `job`.

    What the ranks write goes to `log` in the job's folder. Raises ConfigError as `complete_job` does.
    """
    job = complete_job(machine, job)
    step = list(_step_lines(machine, job.nodes, stop_seconds(machine, job)))
    parts = (
        _array_header(machine, job, array),
        ["set -eo pipefail", f"cd -- {shlex.quote(str(job.directory))}"],
        [*_reasoned_lines(machine.setup), *job.setup],
        _environment_lines(machine, job),
        [_MEETING_POINT],
        _folder_lines(machine, job),
        ["step=(", *("    " + line for line in step), ")", f"rank=({shlex.join(array.command)})"],
        [_TRAP],
        [_ARRAY_TASK.format(folders=shlex.quote(str(array.folders)), end=ARRAY_END)],
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


_ARRAY_TASK = """\
mapfile -t folders < {folders}
folder="${{folders[$SLURM_ARRAY_TASK_ID]}}"
# A rank that fails ends the others; ranks that stop in good order have written their checkpoint together before.
SECONDS=0
code=0
srun "${{step[@]}}" --kill-on-bad-exit=1 "${{rank[@]}}" "$folder" >> "$folder/log" 2>&1 || code=$?
# Renamed: whoever looks for the file finds it whole.
echo "$code $SECONDS" > "$folder/.{end}"
mv -- "$folder/.{end}" "$folder/{end}"
exit "$code\""""


_MEETING_POINT = f"""\
# Ranks take their numbers from Slurm; what torchrun may have left in the submitting shell would come first.
unset {" ".join(_TORCHRUN)}
# All ranks meet on the first host of the job, at a port that other jobs there are unlikely to have.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{hosts[0]:?scontrol names no host of this job}}"
export MASTER_PORT=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))
# Names of what they tell each other there begin with this: nobody outside the job knows them.
export TORCHELASTIC_RUN_ID="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')\""""
_PREFLIGHT = f"""\
# Before the first step: settings, binding, devices and links of all ranks. What is slow or far from its cores is
# named in the log; what training would fail of, or compute wrong with, ends the job ({UNFIT}).
code=0
srun "${{step[@]}}" --time={_PREFLIGHT_MINUTES} "${{doctor[@]}}" || code=$?
if [ "$code" -eq {UNFIT} ]; then
    exit {UNFIT}
elif [ "$code" -ne 0 ]; then
    echo "phalanx doctor could not look at all ranks (exit code $code); training starts all the same" >&2
fi"""
_CHECKPOINTS = """\
run={run}
newest_checkpoint() {{ ls -d -- "$run/checkpoints"/step-???????? 2>/dev/null | tail -n 1 || true; }}
# From which the job begins.
begun=$(newest_checkpoint)"""
_TRAP = """\
# Slurm tells this shell of a cancelled or preempted job. It notes that and waits for the ranks, which save and
# stop: if it ended at once, the job would end with it.
ended_by_slurm=
trap 'ended_by_slurm=1' TERM"""
_TRAINING = """\
code=0
srun "${step[@]}" "${train[@]}" || code=$?"""
_RESTARTS = """\
# A supervisor on each node starts its ranks, and again after a fault. Where one of them is lost, or a signal killed it, all
# begin again on the same nodes, from the newest whole checkpoint. Without a newer one than the time before that is in vain:
# after {restarts} times the job ends with {given_up} and is not queued again.
# Reports of faults name their nodes here, one a line. The first of an attempt is the one whose rank failed first.
failed_nodes() {{ cat -- "$run/{failed_nodes}" 2>/dev/null || true; }}
vain=0 further= suspect=
while true; do
    before=$(newest_checkpoint)
    reports=$(failed_nodes | wc -l)
    code=0
    rm -f -- "$run/{end}"
    srun "${{supervisors[@]}}" "${{train[@]}}" || code=$?
    # That of the first supervisor: of all, srun tells the largest, even of one that was killed and left out of the run.
    if [ -s "$run/{end}" ]; then code=$(< "$run/{end}"); fi
    case "$code:$ended_by_slurm" in {codes}) ;; *) break ;; esac
    if [ "$(newest_checkpoint)" != "$before" ]; then vain=0 further=1 suspect=; fi
    vain=$((vain + 1))
    if [ "$vain" -gt {restarts} ]; then
        echo "given up: a rank or a node was lost (exit code $code), and no newer checkpoint came of {restarts} restarts" >&2
        code={given_up}
        break
    fi
    sleep {backoff}
{leave_out}    echo "a rank or a node was lost (exit code $code); all begin again from the newest checkpoint" >&2
done"""
_LEAVE_OUT = f"""\
    failed=$(failed_nodes | sed -n "$((reports + 1))p")
    # Twice in a row without a newer checkpoint: the job goes on without that node. Slurm changes the nodes of a waiting job
    # alone, and ends this shell where the job is queued again: so a new job is submitted, which is told whom to leave out.
    if [ -n "$failed" ] && [ "$failed" = "$suspect" ] && [[ " ${{hosts[*]}} " == *" $failed "* ]]; then
        if [ $# -gt 0 ] && [ -z "$further" ]; then
            echo "given up: $failed fails as $1 did, which is left out already: it is not the node's fault" >&2
            code={GIVEN_UP}
            break
        fi
        left_out=$(IFS=,; echo "$failed${{*:+,$*}}")
        if sbatch --exclude="$left_out" --chdir="$SLURM_SUBMIT_DIR" "$0" "$failed" "$@"; then
            echo "$failed failed twice in a row; a new job goes on without $left_out" >&2
            break
        fi
    fi
    suspect=$failed
"""
_REQUEUE = f"""\
# Time was up, the ranks have saved and stopped (128 + TERM, USR1 or USR2). The job is queued again and
# goes on from there. A cancelled job stays cancelled, and a preempted one Slurm puts back by itself.
case "$code:$ended_by_slurm" in {" | ".join(f"{code}:" for code in REQUEUED)})
    if [ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] && [ "$(newest_checkpoint)" = "$begun" ]; then
        echo "given up: queued again, the job came to no newer checkpoint before its time was up" >&2
        code={GIVEN_UP}
    else
        scontrol requeue "$SLURM_JOB_ID"
    fi
esac"""
"""Parts of a script that are the same on every machine."""


def _training_lines(machine: Machine, job: Job) -> Iterator[str]:
    """Yield the lines that train, again and again after a fault where the job says so."""
    yield _CHECKPOINTS.format(run=shlex.quote(str(job.run_dir)))
    yield _TRAP
    if not job.supervised:
        yield _TRAINING
    else:
        yield _RESTARTS.format(
            failed_nodes=FAILED_NODES,
            end=END_FILE,
            restarts=job.restarts,
            given_up=GIVEN_UP,
            codes=" | ".join(f"{code}:" for code in KILLED),
            backoff=math.ceil(job.backoff_s),
            leave_out=_LEAVE_OUT if machine.stop.requeue else "",
        )


def _longest_seconds(partition: Partition, nodes: int) -> int:
    for limit in partition.limits:
        if nodes <= limit.nodes:
            return round(limit.hours * 3600)
    most = partition.limits[-1].nodes
    raise ConfigError(
        f"--nodes {nodes} is more than partition {partition.name} has for a job\n"
        f"nearest legal: --nodes {most} ({partition.source})"
    )


def _title_lines(machine: Machine, title: str, command: str) -> Iterator[str]:
    """Yield how a script begins. title: what it is. command: which subcommand wrote it."""
    yield "#!/bin/bash"
    yield _comment_line(f"{title}, one for each {machine.node.device}.")
    yield f"# Written by phalanx {command}. Reasons name their sources:"
    for document, name in machine.documents.items():
        yield _comment_line(f"[{document}] {name}")


def _header_lines(machine: Machine, job: Job) -> Iterator[str]:
    ranks = job.nodes * machine.node.devices
    yield from _title_lines(machine, f"Training on {machine.about}: {ranks} ranks", "launch")
    # The name becomes part of the name of the log (%x).
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", job.run.name.removesuffix(".yaml")) or "run"
    yield f"#SBATCH --job-name=phalanx-{name}"
    yield from _resource_lines(machine, job)
    yield "# One log for all attempts: a job that starts again goes on writing where it was."
    yield "#SBATCH --output=%x-%j.log"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'' if machine.stop.requeue else 'no-'}requeue"
    if job.supervised and job.replans:
        yield "# The run goes on without a node that fails: Slurm must not end the job with it."
        yield "#SBATCH --no-kill"
    stop_s = stop_seconds(machine, job)
    yield f"# {stop_s} s before the end the ranks are told to save and stop (USR1 and USR2 do the same)."
    if job.save_seconds is not None:
        yield f"# The slowest checkpoint of this run so far took {job.save_seconds:.1f} s."
    yield "# The signal goes to the ranks, not to this shell (no B:), which could hand it to srun alone, and srun ends them"
    yield "# at once."
    yield f"#SBATCH --signal=TERM@{stop_s}"


def _array_header(machine: Machine, job: Job, array: JobArray) -> Iterator[str]:
    ranks = job.nodes * machine.node.devices
    yield from _title_lines(machine, f"{array.tasks} trials on {machine.about}: {ranks} ranks each", "tune")
    yield f"#SBATCH --job-name={array.name}"
    yield f"#SBATCH --array=0-{array.tasks - 1}"
    yield from _resource_lines(machine, job)
    yield f"#SBATCH --output={array.logs}/%A_%a.log"
    yield "# What becomes of a job that was lost is for the study to say."
    yield "#SBATCH --no-requeue"
    yield "# Before the end the ranks are told to save and stop; the trial goes on in a further job."
    yield f"#SBATCH --signal=TERM@{stop_seconds(machine, job)}"


def _resource_lines(machine: Machine, job: Job) -> Iterator[str]:
    assert job.seconds is not None
    yield f"#SBATCH --nodes={job.nodes}"
    yield f"#SBATCH --ntasks-per-node={machine.node.devices}"
    yield f"#SBATCH --cpus-per-task={machine.node.cores_per_task}"
    yield f"#SBATCH --time={format_walltime(job.seconds)}"
    if job.partition is not None:
        yield f"#SBATCH --partition={job.partition}"
    if job.account is not None:
        yield f"#SBATCH --account={job.account}"
    yield from _option_lines(machine.job_slurm.sbatch, "#SBATCH ")


def _environment_lines(machine: Machine, job: Job) -> Iterator[str]:
    yield "# One thread for each core of a rank."
    yield f"export OMP_NUM_THREADS={machine.node.cores_per_task}"
    for variable in machine.environment:
        if variable.nodes == "any" or (variable.nodes == "one") == (job.nodes == 1):
            yield _comment_line(f"{variable.reason} ({variable.source})")
            yield f"export {variable.name}={_quote_value(variable.value)}"


def _folder_lines(machine: Machine, job: Job) -> Iterator[str]:
    names = [variable.name for variable in machine.environment if variable.directory]
    if names:
        yield "# Folders of each node's own."
        paths = " ".join(f'"${name}"' for name in names)
        yield f"srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 --cpus-per-task=1 mkdir -p -- {paths}"


def _command_lines(machine: Machine, job: Job) -> Iterator[str]:
    """Yield the commands of every rank, and the options of the step that starts them, as arrays of the shell."""
    each = ["--nproc", str(machine.node.devices)] if job.supervised else []
    commands = {"train": ["phalanx", "train", str(job.run), *each, *job.overrides]}
    if job.examined_as is not None:
        commands["doctor"] = ["phalanx", "doctor", "--cluster", job.examined_as]
    for name, words in commands.items():
        yield f"{name}=({shlex.join(words)})"
        if job.image is not None and machine.container is not None:
            # exec: the training process replaces the shell, which would not pass a signal on.
            inside = "; ".join(["set -e", *job.setup, 'exec "$@"'])
            around = [*machine.container.command, job.image, "bash", "-c", inside, "rank"]
            yield f'{name}=({shlex.join(around)} "${{{name}[@]}}")'
    if not job.supervised or job.examined_as is not None:
        yield "step=("
        yield from ("    " + line for line in _step_lines(machine, job.nodes, stop_seconds(machine, job)))
        yield ")"
    if job.supervised:
        yield "# One task on each node starts the ranks there, each on the cores nearest to its device where known."
        if machine.node.cpu_masks:
            yield f"export {CPU_MASKS}={','.join(machine.node.cpu_masks)}"
        yield "supervisors=("
        yield from ("    " + line for line in _supervisor_lines(machine, job))
        yield ")"


def srun_command(machine: Machine, nodes: int, command: Iterable[str], seconds: int | None = None) -> list[str]:
    """Return the words that run `command` as one rank per device of `nodes` nodes, inside an allocation of `machine`.

    The ranks have nothing to save: when one fails, Slurm kills the others. seconds: time after which Slurm ends the
    step, even if this process is gone; Slurm counts whole minutes, so it is rounded up.
    """
    options = shlex.split("\n".join(_step_lines(machine, nodes, machine.stop.seconds_before_end)), comments=True)
    limit = [] if seconds is None else [f"--time={-(-seconds // 60)}"]
    # Where an option is given twice, srun takes the last: this --kill-on-bad-exit overrides that of training.
    return ["srun", *options, "--kill-on-bad-exit=1", *limit, *command]


def _step_lines(machine: Machine, nodes: int, wait_s: int) -> Iterator[str]:
    """Yield the options of srun for one rank per device, with their reasons as comments of the shell.

    wait_s: seconds that ranks have after the first of them has ended.
    """
    node = machine.node
    yield f"--nodes={nodes} --ntasks={nodes * node.devices} --ntasks-per-node={node.devices}"
    yield f"--cpus-per-task={node.cores_per_task}"
    yield "# Neighbouring ranks on one node: they share the axes that talk most."
    yield "--distribution=block"
    if node.cpu_masks:
        yield "# For each rank of a node the cores nearest to its device, in the order of the devices."
        yield f"--cpu-bind=mask_cpu:{','.join(node.cpu_masks)}"
    else:
        yield "--cpu-bind=cores"
    yield from _option_lines(machine.job_slurm.srun, "")
    yield "# A rank that ends must not have the others killed while they save, nor leave them waiting for ever."
    yield f"--kill-on-bad-exit=0 --wait={wait_s}"


def _supervisor_lines(machine: Machine, job: Job) -> Iterator[str]:
    """Yield the options of srun for one supervisor per node, which starts a rank for each device there."""
    node = machine.node
    yield f"--nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    yield f"--cpus-per-task={node.devices * node.cores_per_task}"
    yield "--distribution=block"
    if node.cpu_masks:
        yield f"--cpu-bind=mask_cpu:{sum(int(mask, 16) for mask in node.cpu_masks):#x}"
    else:
        yield "--cpu-bind=cores"
    for option in machine.job_slurm.srun:
        if option.per_node is None or option.per_node:
            yield _comment_line(f"{option.reason} ({option.source})")
            yield shlex.quote(option.per_node or option.option)
    yield "# Supervisors end each other's ranks by themselves, and go on without a node where the run file says so."
    yield f"--kill-on-bad-exit=0 --wait=0{' --no-kill' if job.replans else ''}"


def _option_lines(options: Iterable[Option], before: str) -> Iterator[str]:
    margin = " " * (len(before) - len(before.lstrip()))
    for option in options:
        yield margin + _comment_line(f"{option.reason} ({option.source})")
        yield before + shlex.quote(option.option)


def _reasoned_lines(lines: Iterable[Line]) -> Iterator[str]:
    for line in lines:
        yield _comment_line(f"{line.reason} ({line.source})")
        yield line.line


def _comment_line(text: str) -> str:
    return "# " + " ".join(text.split())


def _quote_value(value: str) -> str:
    """Return `value` in double quotes, where $NAME and ${NAME} stay variables and everything else is literal."""
    literal = [re.sub(r'([\\"`$])', r"\\\1", part) for part in _EXPANDED.split(value)]
    variables = [*_EXPANDED.findall(value), ""]
    return '"' + "".join(part + variable for part, variable in zip(literal, variables, strict=True)) + '"'
