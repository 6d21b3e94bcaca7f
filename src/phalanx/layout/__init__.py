"""How one model is spread over devices: legality, mesh, sharding, recompute, initial values, and applying it all."""
