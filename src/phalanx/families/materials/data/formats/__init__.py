"""Readers of files of structures that need a package of their own, a module a package."""
