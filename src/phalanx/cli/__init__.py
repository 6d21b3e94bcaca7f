"""The command line: a module a subcommand, which parses, calls and prints; `phalanx.cli.main` lists them."""
