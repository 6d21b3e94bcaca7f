"""All legal layouts of a run judged and ranked."""
