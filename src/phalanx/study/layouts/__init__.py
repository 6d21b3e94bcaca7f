"""Search of layouts: the fastest one, by measured trials that start from the planner's expectations."""
