"""Runs, plans, studies and ensembles as HTML pages, and the pieces that pages and terminals share."""
