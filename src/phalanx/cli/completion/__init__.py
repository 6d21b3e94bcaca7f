"""`phalanx completion`: the script that lets a shell complete subcommands, options, fields, their values and presets.

The scripts ask the program by the protocol that Typer has for fish, which gives the line as it was typed. Typer's own script
for bash would ask with words that bash has parted at every =.
"""

from __future__ import annotations

from importlib.resources import files

from phalanx.cli.options.starting import CompletionArguments


def run_completion(asked: CompletionArguments) -> None:
    """Run the subcommand."""
    print(files(__package__).joinpath(f"phalanx.{asked.shell}").read_text("utf-8"), end="")
