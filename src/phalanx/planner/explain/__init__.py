"""Why a layout is as fast as it is, and what more devices or time would give."""
