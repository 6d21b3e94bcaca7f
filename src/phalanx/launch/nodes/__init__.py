"""The supervisors of several nodes: what they decide together, and the connections between them."""
