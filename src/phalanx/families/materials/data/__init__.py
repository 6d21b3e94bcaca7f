"""Structures of atoms: files, units, neighbours, prepared shards, and batches of equal cost."""
