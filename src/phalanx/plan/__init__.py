"""Which layouts are worth running: all legal ones judged by the cost models, ranked, explained, scaled and budgeted."""
