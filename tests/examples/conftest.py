"""Tests of examples call the command line as its own tests do."""

from cli.conftest import call

__all__ = ["call"]
