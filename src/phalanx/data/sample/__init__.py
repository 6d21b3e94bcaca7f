"""Data to try the examples with, made by a computation: no download, the same numbers again on the same machine."""
