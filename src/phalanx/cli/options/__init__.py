"""What each subcommand takes: its arguments, options and help, declared apart from what it does.

A module here imports neither torch nor what computes: `phalanx SUBCOMMAND --help` and wrong options answer at once. The
function `declare_SUBCOMMAND` has only a docstring, the help; the dispatcher calls `run_SUBCOMMAND` of the module
`phalanx.cli.SUBJECT.SUBCOMMAND` with the arguments, where SUBJECT is the name of the module here.
"""
