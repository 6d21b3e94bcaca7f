"""Streamed (ring) weights, `gather: stream` in the run file (Hybrid-STOP): chunks of matrices travel a ring of ranks."""
