"""Training jobs as trials of a study."""
