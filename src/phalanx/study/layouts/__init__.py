"""Which layout is fastest, by measured trials."""
