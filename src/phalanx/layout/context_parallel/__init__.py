"""Attention over ranks that hold different positions of the same samples: ring and Ulysses; and which kernel runs it."""
