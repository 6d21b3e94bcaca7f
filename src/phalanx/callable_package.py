"""Packages that are called like the function of the same name in `phalanx.api`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A room of Phalanx whose name is a function of its Python interface as well, as in `phalanx.train(run, run_dir)`.

    Importing anything in a package binds the package to its name in the parent. So `phalanx.train` would be the function or
    the package, by what was imported before; a package that can be called is both at any time.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function of `phalanx.api` that has the name of this package."""
        return getattr(import_module("phalanx.api"), self.__name__.rpartition(".")[2])(*arguments, **options)
