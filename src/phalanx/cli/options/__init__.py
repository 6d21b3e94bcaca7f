"""Arguments, options and help of each subcommand, declared apart from what it does.

A module here imports neither torch nor what computes: `phalanx SUBCOMMAND --help` and wrong options answer at once. A
class `SubcommandArguments` has one field an argument or option, and the help as its docstring; `phalanx.cli.main` makes
one of what was typed and calls `run_SUBCOMMAND` with it.
"""
