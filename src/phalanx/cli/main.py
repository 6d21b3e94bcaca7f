"""The `phalanx` command: which subcommands there are, and what happens when one fails.

`SUBCOMMANDS` says where each one is. Its arguments are declared in `phalanx.cli.options`, apart from what it does: that is
imported when all arguments are understood, so that help and wrong options answer at once, without loading torch.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from inspect import Signature, signature
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx import __version__
from phalanx.cli.console import print_error, show_examples
from phalanx.cli.guide_pages import find_page
from phalanx.errors import Interrupted, PhalanxError, nearest_names
from phalanx.hardware.host import passive_waits
from phalanx.launch.parent import die_with_parent
from phalanx.printable import write_stderr


@dataclass(frozen=True)
class Subcommand:
    """One subcommand: where it is, its line in the help, and commands to show."""

    name: str
    module: str
    """Module below `phalanx.cli` with the function `run_NAME`, or with the Typer application `NAME_app`."""
    options: str | None
    """Module of `phalanx.cli.options` with `NameArguments`; None for an application, which declares its own subcommands."""
    help: str
    examples: tuple[str, ...]


SUBCOMMANDS = (
    Subcommand(
        "init",
        "init",
        "starting",
        "Ask five questions and write a run file.",
        (
            "phalanx init",
            "phalanx init run.yaml --family language --data data/text --devices 1 --goal try --size nano-10m",
            "phalanx init big.yaml --family language --data data/text --devices frontier:64 --goal train --size 24h",
        ),
    ),
    Subcommand(
        "data",
        "data",
        None,
        "Prepare text, structures and fields for training.",
        ("phalanx data prepare texts/ --out data/texts", "phalanx data show data/texts"),
    ),
    Subcommand(
        "config",
        "config",
        None,
        "Show, check and explain run files.",
        ("phalanx config list", "phalanx config check examples/quickstart.yaml training.steps=1000"),
    ),
    Subcommand(
        "plan",
        "planning.plan",
        "planning",
        "Find the layouts worth running on a cluster.",
        (
            "phalanx plan examples/gpt-175b.yaml --cluster frontier --devices 1024",
            "phalanx plan run.yaml --cluster dgx-h100 --fit --write run.planned.yaml",
            "phalanx plan run.yaml --cluster lumi --devices 512 --why tp=2 --scale 64..4096 --html plan.html",
            "phalanx plan --check runs.csv",
        ),
    ),
    Subcommand(
        "calibrate",
        "planning.calibrate",
        "planning",
        "Measure this machine for better plans.",
        (
            "phalanx calibrate --nproc 4",
            "torchrun --nproc-per-node 8 -m phalanx calibrate --cluster frontier --out frontier.profile.yaml",
            "phalanx calibrate --from-runs runs.csv",
        ),
    ),
    Subcommand(
        "search",
        "planning.search",
        "planning",
        "Find the best layout by measuring.",
        (
            "phalanx search run.yaml --cluster h200-x4 --devices 4 --measure 10 --write best.yaml --html search.html",
            "phalanx search run.yaml --cluster frontier --devices 1024 --where slurm --storage study.log",
            "phalanx search examples/gpt-175b.yaml --cluster frontier --devices 1024 --where simulated",
        ),
    ),
    Subcommand(
        "tune",
        "planning.tune",
        "planning",
        "Find the best hyperparameters by training.",
        (
            "phalanx tune examples/materials-tune.yaml --out studies/materials --write best.yaml --html study.html",
            "phalanx tune run.yaml --out studies/big --where slurm --cluster frontier --trials 200",
            "phalanx tune --show studies/materials",
        ),
    ),
    Subcommand(
        "verify",
        "planning.verify",
        "planning",
        "Prove that a layout equals one rank.",
        (
            "phalanx verify examples/quickstart.yaml tp=2 pp=2",
            "phalanx verify examples/quickstart.yaml --all 4",
            "torchrun --nproc-per-node 8 -m phalanx verify run.yaml --full --precision fp32",
        ),
    ),
    Subcommand(
        "dryrun",
        "planning.dryrun",
        "planning",
        "Run one rank of many without devices.",
        (
            "phalanx dryrun examples/llama3-8b.yaml --devices 64",
            "phalanx dryrun examples/gpt-1t.yaml --devices 24576 --rank 12345 --json",
        ),
    ),
    Subcommand(
        "doctor",
        "doctor",
        "training",
        "Check that a machine is fit to train on.",
        (
            "phalanx doctor",
            "phalanx doctor --nproc 4 --json",
            "srun --ntasks-per-node=8 phalanx doctor --cluster frontier",
        ),
    ),
    Subcommand(
        "train",
        "train",
        "training",
        "Train a model, or go on with a run.",
        (
            "phalanx train examples/quickstart.yaml",
            "phalanx train runs/quickstart training.steps=2000",
            "torchrun --nproc-per-node 8 -m phalanx train examples/quickstart.yaml",
        ),
    ),
    Subcommand(
        "watch",
        "models.watch",
        "models",
        "Watch a run or a study on the terminal.",
        ("phalanx watch runs/quickstart", "phalanx watch studies/materials", "phalanx watch run.search.log --once"),
    ),
    Subcommand(
        "chaos",
        "chaos",
        "training",
        "Inject faults into a run and see it recover.",
        (
            "phalanx chaos examples/quickstart.yaml --nproc 4 --minutes 30 --seed 1 training.steps=200",
            "phalanx chaos run.yaml --nproc 8 --faults kill,hang,bitflip dp_replicate=2",
        ),
    ),
    Subcommand(
        "bench",
        "bench",
        "training",
        "Measure a run's speed beside its plan.",
        (
            "phalanx bench examples/llama3-8b.yaml dp_shard=4 --nproc 4 --cluster h200-x4",
            "phalanx bench run.yaml --devices 64 --where slurm --cluster frontier --json",
        ),
    ),
    Subcommand(
        "launch",
        "launch",
        "training",
        "Write or submit a Slurm job that trains.",
        ("phalanx launch run.yaml --cluster frontier --nodes 2 --account ABC123 --out run.sbatch",),
    ),
    Subcommand(
        "evaluate",
        "models.evaluate",
        "models",
        "Held-out loss and perplexity, and scores on in-context tasks.",
        (
            "phalanx evaluate runs/quickstart",
            "phalanx evaluate runs/quickstart --tasks tasks.yaml --nproc 2",
        ),
    ),
    Subcommand(
        "generate",
        "models.generate",
        "models",
        "Write text with a checkpoint.",
        ('phalanx generate runs/quickstart --prompt "def "',),
    ),
    Subcommand(
        "ensemble",
        "models.ensemble",
        "models",
        "Make one model of several, with uncertainties.",
        (
            "phalanx ensemble studies/xtb --top 5 --out ensembles/xtb",
            "phalanx ensemble runs/a runs/b runs/c --out ensembles/abc --nproc 2",
            "phalanx ensemble examples/materials-xtb.yaml --train --seeds 5 --out ensembles/seeds",
        ),
    ),
    Subcommand(
        "select",
        "models.select",
        "models",
        "Choose structures to label next, by an ensemble.",
        ("phalanx select ensembles/xtb 'md/*.extxyz' --top 200 --out next.extxyz",),
    ),
    Subcommand(
        "predict",
        "models.predict",
        "models",
        "Predict energies and forces of many structures.",
        ("phalanx predict runs/materials-xtb 'md/*.extxyz' --out predictions --nproc 4",),
    ),
    Subcommand(
        "lammps",
        "models.lammps",
        "models",
        "Run LAMMPS with a network as its potential.",
        ('phalanx lammps runs/materials-xtb in.ethanol --elements "H C O" --precision fp64',),
    ),
    Subcommand(
        "forecast",
        "models.forecast",
        "models",
        "Forecast weather and score it.",
        ("phalanx forecast runs/climax-small --hours 120 --map geopotential_500",),
    ),
    Subcommand(
        "errors",
        "models.errors",
        "models",
        "Errors of a materials model.",
        ("phalanx errors runs/materials-xtb", "phalanx errors runs/materials-xtb --split validation --json"),
    ),
    Subcommand(
        "report",
        "models.report",
        "models",
        "Make an HTML page about a run.",
        ("phalanx report runs/quickstart", "phalanx report runs/quickstart --serve"),
    ),
    Subcommand(
        "convert",
        "models.convert",
        "models",
        "Import or export Hugging Face checkpoints.",
        ("phalanx convert runs/quickstart exported/",),
    ),
    Subcommand(
        "completion",
        "completion",
        "starting",
        "Print the completion script of a shell.",
        ("phalanx completion bash",),
    ),
)

# typer exports none of the bases of its usage errors, and where it keeps them differs between its releases.
_UsageError: Any = typer.BadParameter.__mro__[1]


class _LazyCommand(TyperCommand):
    """Stands for a subcommand in the help and in completion; becomes the real command when its arguments are parsed."""

    def __init__(self, subcommand: Subcommand) -> None:
        super().__init__(subcommand.name, short_help=subcommand.help)
        self.subcommand = subcommand

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        # Only the options are imported for parsing, not what computes.
        if self.subcommand.options is None:
            target = getattr(_import_fast(f"phalanx.cli.{self.subcommand.module}"), f"{self.subcommand.name}_app")
        else:
            options = _import_fast(f"phalanx.cli.options.{self.subcommand.options}")
            target = typer.Typer(add_completion=False, rich_markup_mode=None)
            declared = target.command(name=self.subcommand.name, context_settings=app.info.context_settings)
            declared(_defer_import(self.subcommand, getattr(options, f"{self.subcommand.name.title()}Arguments")))
        command = typer.main.get_command(target)
        command.name = self.subcommand.name
        if command.epilog is None and "Example" not in (command.help or ""):
            command.epilog = show_examples(*self.subcommand.examples)
        return command.make_context(info_name, args, parent=parent, **extra)


class _CommandGroup(TyperGroup):
    """All subcommands, in the order in which one meets them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for subcommand in SUBCOMMANDS:
            self.add_command(_LazyCommand(subcommand))


app = typer.Typer(
    name="phalanx",
    cls=_CommandGroup,
    help="Train foundation models on AMD, NVIDIA or plain CPU devices with one program.",
    epilog="Fields of a run file are changed as section.field=value, those of the layout as field=value (tp=2); "
    "phalanx config fields lists them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code."""
    # before torch is loaded, which reads these settings once
    os.environ.update(passive_waits(os.environ))
    try:
        # a rank whose launcher was killed is told to stop; training then does so in good order
        die_with_parent(signal.SIGTERM)
    except PhalanxError as error:
        print_error(str(error))
        sys.exit(error.exit_code)
    code = run_command_line(sys.argv[1:] if arguments is None else arguments)
    # At its end Python would look for garbage in all that torch has made, which takes most of a second.
    gc.freeze()
    sys.exit(code)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; defects of ours come out as the exceptions they are."""
    command = typer.main.get_command(app)
    # Typer's options for that print and install scripts of its own, whose words bash has parted at every =.
    command.params = [one for one in command.params if one.name not in ("install_completion", "show_completion")]
    try:
        # not standalone: Typer would end the process itself, with its own messages
        result = command.main(list(arguments) or ["--help"], prog_name="phalanx", standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as stopped:
        # no error: what was asked for has been done
        write_stderr(str(stopped))
        return stopped.exit_code
    except PhalanxError as error:
        print_error(str(error))
        # Some messages name a page themselves.
        if arguments and "docs/" not in str(error):
            write_stderr(f"read on: {find_page(str(error), arguments[0])}")
        return error.exit_code
    except _UsageError as error:
        # `phalanx config` alone asks for help, in the words of the library an error
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 0
        nearest = list(getattr(error, "possibilities", None) or ())
        message: str = error.message if nearest else error.format_message()
        if unknown := re.match("No such command '(.*?)'", message):
            message, nearest = unknown[0], nearest_names(unknown[1], list(error.ctx.command.commands))
        elif error.__cause__ is not None and hasattr(error.__cause__, "errors"):
            message = _describe_wrong_option("/".join(error.param.opts), error.__cause__.errors()[0]) or message
        lines = [message[:1].lower() + message[1:].rstrip(".")]
        if nearest:
            lines.append(f"nearest: {', '.join(nearest)}")
        elif error.ctx is not None:
            lines.append(f"{error.ctx.command_path} --help shows what it takes")
        print_error("\n".join(lines))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        # 128 + the number of SIGINT, as shells expect
        return 130
    except BrokenPipeError:
        # The reader of stdout has gone. Python would complain at exit that it cannot flush: it flushes into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        if (problem := _describe_impossible_path(error)) is None:
            raise
        print_error(problem)
        return 2
    return result if isinstance(result, int) else 0


def _describe_impossible_path(error: OSError | ValueError) -> str | None:
    """Return what is wrong with a path that no system call takes; None for any other error.

    Paths come from arguments, run files and prepared data, and each is touched first somewhere else.
    """
    if isinstance(error, OSError):
        name = str(error.filename)
        too_long = error.errno == errno.ENAMETOOLONG
        return f"the path {name[:60]}... of {len(name):,} characters is too long for this system" if too_long else None
    return "a path holds a NUL character, which no file's name can have" if "embedded null" in str(error) else None


def _print_version(wanted: bool) -> None:
    if wanted:
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"phalanx {__version__} (torch {metadata.version('torch')}, Python {python})")
        raise typer.Exit


@app.callback()
def phalanx(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, help="Print the version and exit.", callback=_print_version),
    ] = False,
) -> None:
    """Take the options in front of the subcommand."""


def _import_fast(name: str) -> ModuleType:
    """Import a module while the garbage collector rests: a quarter of the time would go into looking through torch."""
    collects = gc.isenabled() and name not in sys.modules
    if collects:
        gc.disable()
    try:
        return import_module(name)
    finally:
        if collects:
            # What modules define stays for good.
            gc.freeze()
            gc.enable()


def _defer_import(subcommand: Subcommand, declared: type) -> Callable[..., None]:
    """Return a function that takes the fields of `declared`, and imports what the subcommand does when it is called."""

    def run_subcommand(**arguments: Any) -> None:
        module = _import_fast(f"phalanx.cli.{subcommand.module}")
        getattr(module, f"run_{subcommand.name}")(declared(**arguments))

    # Typer reads arguments, their options and the help off the signature, the annotations and the docstring of a function.
    hints = get_type_hints(declared, include_extras=True)
    fields = [one.replace(annotation=hints[one.name]) for one in signature(declared).parameters.values()]
    run_subcommand.__doc__ = declared.__doc__
    run_subcommand.__annotations__ = hints
    setattr(run_subcommand, "__signature__", Signature(fields))  # noqa: B010
    return run_subcommand


_ALLOWED = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "int_parsing": "must be a whole number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
}
"""What an option takes, by the kind of pydantic's complaint."""


def _describe_wrong_option(option: str, complaint: Any) -> str | None:
    """Return a complaint of pydantic about an option's value as errors of run files are worded; None for a rare kind."""
    if complaint["type"] == "value_error":
        return f"{option}: {complaint['ctx']['error']}"
    allowed = _ALLOWED.get(complaint["type"])
    return allowed and f"{option}={complaint['input']} {allowed.format(**complaint.get('ctx', {}))}"
