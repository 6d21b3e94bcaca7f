"""`phalanx launch`: write, and submit, the batch script that trains a run on a cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from phalanx.cli.console import print_json, print_lines, write_file
from phalanx.cli.options.training import LaunchArguments
from phalanx.cli.train import choose_run_directory
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.errors import PhalanxError
from phalanx.families.registry import bind
from phalanx.hardware.machine import Machine, described_names, load_machine
from phalanx.launch.job_script import Job, complete_job, format_walltime, launch_script, parse_walltime
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.training.run_dir import measured_save_seconds


def run_launch(asked: LaunchArguments) -> None:
    """Run the subcommand."""
    out = asked.out
    machine = load_machine(asked.cluster)
    # the job may start elsewhere: a description that is a file needs its whole path there
    described = asked.cluster if asked.cluster in described_names() else str(Path(asked.cluster).absolute())
    loaded = load_run(asked.run, asked.overrides or [])
    # the same words as the job's, so the same folder
    run_dir = choose_run_directory(loaded, asked.run, asked.overrides or [])
    wanted = Job(
        run=asked.run,
        nodes=asked.nodes,
        directory=Path.cwd(),
        run_dir=run_dir,
        overrides=(*_failure_words(loaded, machine), *(asked.overrides or ())),
        seconds=None if asked.time is None else parse_walltime(asked.time),
        account=asked.account,
        partition=asked.partition,
        setup=tuple(asked.setup or ()),
        image=asked.image,
        restarts=loaded.restart.max,
        backoff_s=loaded.restart.backoff_s,
        replans=loaded.restart.layout == "replan",
        save_seconds=measured_save_seconds(run_dir),
        examined_as=described if asked.preflight else None,
    )
    job = complete_job(machine, wanted)
    ranks = job.nodes * machine.node.devices
    layout = resolve_layout(bind(loaded), ranks, machine.node.devices)
    # before anything is written: a login node without Slurm is told so at once
    sbatch = _find_sbatch() if asked.submit else None
    text = launch_script(machine, job)
    out = out or (
        Path(f"{asked.run.resolve().name.removesuffix('.yaml')}-{machine.name}.sbatch") if asked.submit else None
    )
    if out is not None:
        write_file(out, text)
    job_id = None if sbatch is None or out is None else _submit_script(sbatch, out)
    if asked.as_json:
        print_json(
            {
                "cluster": machine.name,
                "nodes": job.nodes,
                "world_size": ranks,
                "layout": str(layout),
                "partition": job.partition,
                "time_s": job.seconds,
                "script": None if out is None else str(out),
                "job_id": job_id,
                "text": text,
            }
        )
    elif out is None:
        print(text, end="")
    else:
        _print_job(job, machine, out, f"{ranks} ranks", layout, job_id)


def _failure_words(run: Run, machine: Machine) -> list[str]:
    """Return the override that tells a run which chooses its checkpoints how often the machine's nodes fail."""
    told = "mtbf_hours" in run.cluster.model_fields_set
    if run.checkpoint.every != "auto" or machine.mtbf_hours is None or told:
        return []
    return [f"cluster.mtbf_hours={machine.mtbf_hours:g}"]


def _print_job(
    job: Job, machine: Machine, script: Path, ranks: str, layout: ResolvedLayout, job_id: str | None
) -> None:
    """Print what was written, and whether it was submitted."""
    assert job.seconds is not None
    place = f"{job.nodes} node{'s' if job.nodes > 1 else ''} of {machine.name}"
    print_lines([f"{script}: {ranks} on {place} for {format_walltime(job.seconds)}, {layout}"])
    if job_id is not None:
        print_lines([f"submitted as job {job_id}"], style="green")


def _find_sbatch() -> str:
    found = shutil.which("sbatch")
    if found is None:
        raise PhalanxError(
            "--submit needs sbatch, which is not on PATH; submit on a login node, or write with --out FILE"
        )
    return found


def _submit_script(sbatch: str, script: Path) -> str:
    """Hand `script` to Slurm and return the job's id. Raises PhalanxError with what sbatch said."""
    done = subprocess.run([sbatch, "--parsable", str(script.absolute())], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise PhalanxError(f"sbatch refused {script}: {said}")
    # a cluster's name may follow after a semicolon
    return done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""
