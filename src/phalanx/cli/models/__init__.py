"""Subcommands for trained models: evaluate, generate, forecast, errors, ensemble, select, predict, report, convert."""
