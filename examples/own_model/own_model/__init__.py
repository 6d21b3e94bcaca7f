"""A model that is in none of Phalanx's families, with data of its own, found by entry points."""
