"""Extensions by name: what Phalanx brings along, what a program registers, and what installed packages offer.

One `Registry` for each kind of extension: model families, data sources, optimizers, callbacks. A package offers an item as
an entry point in its `pyproject.toml`:

    [project.entry-points."phalanx.optimizers"]
    lion = "my_package.lion:LION"

Knows no kind of extension; each kind's module makes its registry and says which objects it accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from phalanx.errors import ConfigError, PhalanxError

T = TypeVar("T")


class Registry(Generic[T]):
    """Items of one kind by name, each imported only when it is first looked up.

    A name stands for one item. Ranks and trials are processes of their own: they find an item that was given to `register`
    only where they import the module that does so, and an entry point always.
    """

    def __init__(
        self,
        group: str,
        *,
        built_in: Mapping[str, str] | None = None,
        accepts: Callable[[Any], bool] = lambda item: item is not None,
        expected: str = "an object",
    ) -> None:
        """Make a registry whose entry points stand under `group`, such as "phalanx.optimizers".

        built_in: items of Phalanx itself by name, each as "module:attribute". accepts: whether an object is an item of this
        kind. expected: the same in words, for the message about one that is not.
        """
        self.group = group
        self._accepts = accepts
        self._expected = expected
        self._items: dict[str, T] = {}
        self._built_in = {name: EntryPoint(name, value, group) for name, value in (built_in or {}).items()}
        self._installed: dict[str, EntryPoint] | None = None

    def register(self, name: str, item: T) -> None:
        """Add `item` under `name`. Raises PhalanxError for a name that is taken, and for an object of another kind."""
        # Twice is harmless: programs may call what registers an item more than once.
        if name in self._items and self._items[name] is item:
            return
        if name in self.names():
            raise PhalanxError(f"{self.group}: {name!r} is registered already; choose another name")
        if not self._accepts(item):
            raise PhalanxError(f"{self.group}: {name!r} is {item!r}; {self._expected} is expected")
        self._items[name] = item

    def names(self) -> list[str]:
        """Return every name that can be looked up, sorted; imports none of the items."""
        return sorted({*self._items, *self._built_in, *self._find_installed()})

    def get(self, name: str, field: str = "name") -> T:
        """Return the item called `name`, importing it where this has not been done yet.

        field: the field of the run file that names it, for messages. Raises ConfigError naming the known items and the
        nearest one for a name that stands for nothing, and PhalanxError naming its package for an item that cannot be used.
        """
        if name not in self._items:
            entry = self._built_in.get(name) or self._find_installed().get(name)
            if entry is None:
                known = self.names()
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"{field}={name}: no such entry of {self.group}; {hint}known: {', '.join(known) or 'none'}. An "
                    f"installed package adds more by entry points under {self.group!r}"
                )
            try:
                item = entry.load()
            # A foreign module may raise anything while it is imported, and the user has to hear whose it is.
            except Exception as error:
                raise PhalanxError(
                    f"{_package_of(entry)} offers {self.group} {entry.name!r} as {entry.value}, which cannot be imported: "
                    f"{type(error).__name__}: {error}; mend or uninstall that package"
                ) from error
            if not self._accepts(item):
                raise PhalanxError(
                    f"{_package_of(entry)} offers {self.group} {entry.name!r} as {entry.value}, which is {item!r}; "
                    f"{self._expected} is expected"
                )
            self._items[name] = cast("T", item)
        return self._items[name]

    def _find_installed(self) -> dict[str, EntryPoint]:
        """Return the entry points of installed packages by name. Raises PhalanxError where two have the same name."""
        if self._installed is None:
            found: dict[str, EntryPoint] = {}
            for entry in entry_points(group=self.group):
                other = self._built_in.get(entry.name) or found.get(entry.name)
                # A package that is found twice, say by its sources and by an installed copy, says the same twice.
                if other is not None and other.value != entry.value:
                    raise PhalanxError(
                        f"{_package_of(entry)} offers {self.group} {entry.name!r}, and so does {_package_of(other)}; "
                        f"uninstall one of them"
                    )
                found[entry.name] = entry
            self._installed = found
        return self._installed


def make_extension(make: Callable[[], T], refusal: str) -> T:
    """Return what `make`, the constructor of an extension with the options of a run file, returns.

    refusal: field, value and what cannot be done, for the message. Raises ConfigError for any exception of a foreign
    constructor, and PhalanxErrors as they are.
    """
    try:
        return make()
    except PhalanxError:
        raise
    # A foreign constructor may refuse its options with any exception.
    except Exception as error:
        raise ConfigError(f"{refusal}: {type(error).__name__}: {error}") from error


def _package_of(entry: EntryPoint) -> str:
    return "phalanx itself" if entry.dist is None else f"package {entry.dist.name} {entry.dist.version}"
