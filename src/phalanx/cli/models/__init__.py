"""Subcommands for trained models: evaluate, generate, forecast, errors, ensemble, report, convert."""
