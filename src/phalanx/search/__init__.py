"""Searching layouts by measurement: what may be chosen, trials as processes, their storage, engines, and what matters."""
