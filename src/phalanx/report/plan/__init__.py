"""A plan as a page: its tables and drawings, and all its layouts to look through."""
