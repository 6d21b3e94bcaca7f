"""What each subcommand takes: its arguments, options and help, declared apart from what it does.

A module here imports neither torch nor what computes: `phalanx SUBCOMMAND --help` and wrong options answer at once. The
function that it declares has the name of the subcommand and only a docstring, the help; the dispatcher calls the function of
the same name in `phalanx.cli.SUBCOMMAND` with the arguments.
"""
