"""Data parallelism: how parameters are sharded and gathered, and how gradients are reduced."""
