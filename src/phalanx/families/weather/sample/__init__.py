"""A sample of weather to try the examples with, computed by a small model of the atmosphere."""
