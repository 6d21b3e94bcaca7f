"""Arguments, options and help of what comes before any run: init, completion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.config.presets import preset_names
from phalanx.config.starting_run import GOALS, starting_families


@dataclass(frozen=True)
class InitArguments:
    """Ask what to train, on what and for what, and write a run file whose comments say what each field does.

    A question whose option is given is not asked; with all five, none is. Nothing that is there already is written over.
    """

    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run file to write.")] = Path("run.yaml")
    family: Annotated[str | None, typer.Option(help="What to train.", autocompletion=starting_families)] = None
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Path or address of the training data.")] = None
    devices: Annotated[
        str | None,
        typer.Option(metavar="cpu|N|CLUSTER:N", help="The CPU, N devices of this machine, or N of a cluster."),
    ] = None
    goal: Annotated[
        str | None,
        typer.Option(help="; ".join(f"{name}: {meaning}" for name, meaning in GOALS.items()) + "."),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET|HOURS",
            help="A preset, or a time as in 12h: the largest language model that a cluster can train in it.",
            autocompletion=preset_names,
        ),
    ] = None


@dataclass(frozen=True)
class CompletionArguments:
    """Print the script that lets a shell complete subcommands, options, fields of the run file, their values and presets.

    In ~/.bashrc: source <(phalanx completion bash). In ~/.zshrc, behind compinit: source <(phalanx completion zsh). In
    ~/.config/fish/config.fish: phalanx completion fish | source.
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")]
