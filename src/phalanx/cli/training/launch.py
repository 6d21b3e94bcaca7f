"""`phalanx launch`: write, and submit, the batch script that trains a run on a cluster."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from phalanx.cli.console import print_json, print_lines, write_file
from phalanx.config.load import load_run
from phalanx.errors import PhalanxError
from phalanx.hardware.machine import described_names, load_machine
from phalanx.launch.job_script import Job, complete_job, format_walltime, launch_script, parse_walltime
from phalanx.layout.resolve import resolve_layout


def run_launch(
    *,
    run: Path,
    cluster: str,
    nodes: int,
    overrides: list[str] | None,
    time: str | None,
    account: str | None,
    partition: str | None,
    setup: list[str] | None,
    image: str | None,
    preflight: bool,
    out: Path | None,
    submit: bool,
    as_json: bool,
) -> None:
    """Run the subcommand; `phalanx.cli.options.training` declares its arguments."""
    machine, known = load_machine(cluster), cluster in described_names()
    wanted = Job(
        run=run,
        nodes=nodes,
        directory=Path.cwd(),
        overrides=tuple(overrides or ()),
        seconds=None if time is None else parse_walltime(time),
        account=account,
        partition=partition,
        setup=tuple(setup or ()),
        image=image,
        # the job may start elsewhere: a description that is a file needs its whole path there
        examined_as=(cluster if known else str(Path(cluster).absolute())) if preflight else None,
    )
    job = complete_job(machine, wanted)
    ranks = job.nodes * machine.node.devices
    layout = resolve_layout(load_run(run, overrides or []), ranks, machine.node.devices)
    sbatch = _find_sbatch() if submit else None
    text = launch_script(machine, job)
    if submit and out is None:
        out = Path(f"{run.resolve().name.removesuffix('.yaml')}-{machine.name}.sbatch")
    if out is not None:
        write_file(out, text)
    job_id = None if sbatch is None or out is None else _submit_script(sbatch, out)
    facts = {
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
    if as_json:
        print_json(facts)
    elif out is None:
        print(text, end="")
    else:
        assert job.seconds is not None
        place = f"{job.nodes} node{'s' if job.nodes > 1 else ''} of {machine.name}"
        print_lines([f"{out}: {ranks} ranks on {place} for {format_walltime(job.seconds)}, {layout}"])
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
