"""Pipeline schedules: their tables, simulated and replayed."""
