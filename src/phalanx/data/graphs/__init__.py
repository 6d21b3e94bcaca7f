"""Atomistic structures: readers, neighbour lists, prepared shards, and batches of equal cost."""
