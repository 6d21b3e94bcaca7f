"""Prepared structures kept in the memory of ranks."""
