"""How fast a run is on the devices that are here, beside what a plan expects of it."""
