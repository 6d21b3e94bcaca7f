"""Subcommands for trained models: evaluate, generate, forecast, errors, ensemble, select, report, convert."""
