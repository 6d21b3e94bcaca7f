"""Studies: trials that are proposed, run and learnt from."""
