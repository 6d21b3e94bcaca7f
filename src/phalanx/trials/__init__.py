"""Trials as processes: what came of them, their storage, launching, causes of failures, ranges and samplers, importance."""
