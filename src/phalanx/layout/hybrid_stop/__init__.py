"""Hybrid-STOP's streamed weights: chunks of matrices travel a ring of ranks."""
