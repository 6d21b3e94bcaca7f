"""What is asked before a run is trained: which layout, how fast, how much memory, whether it computes the same."""
