"""Networks of atoms: molecules and materials."""
