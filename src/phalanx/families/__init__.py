"""Model families, one folder each, and what every family answers."""
