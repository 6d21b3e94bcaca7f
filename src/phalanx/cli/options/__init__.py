"""Arguments, options and help of each subcommand, declared apart from what it does.

A module here imports neither torch nor what computes: `phalanx SUBCOMMAND --help` and wrong options answer at once. The
function `declare_SUBCOMMAND` has only a docstring, the help; `phalanx.cli.main` calls `run_SUBCOMMAND` with the arguments.
"""
