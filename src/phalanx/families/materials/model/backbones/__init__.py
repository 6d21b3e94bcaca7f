"""Message passing of published networks."""
