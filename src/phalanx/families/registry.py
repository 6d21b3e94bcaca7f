"""From a run to its bound model: the one place that finds the class of a family.

A family's class is imported only when a run of it is bound: some families need packages that others do not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar, overload

from phalanx.config.families import find_family
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.family import BoundModel
from phalanx.remote_files import use_cache

ModelT = TypeVar("ModelT", bound=BoundModel)


@overload
def bind(run: Run) -> BoundModel: ...
@overload
def bind(run: Run, kind: type[ModelT]) -> ModelT: ...
def bind(run: Run, kind: type[BoundModel] = BoundModel) -> BoundModel:
    """Return the model of `run` as the one object that answers for it.

    kind: the class of the room that asks (`BoundModel`, `LayoutModel`, `TracedModel`, ...). Raises ConfigError, in the words
    of that class, for a family that does not take part there.
    """
    # What a bound model reads by address is kept within the limits of its run.
    use_cache(run.remote.cache, run.remote.cache_gb, run.remote.timeout_s)
    return bound_class(run.model.family, kind)(run)


def bound_class(family: str, kind: type[ModelT]) -> type[ModelT]:
    """Return the class of bound models of `family`, as `bind` does."""
    found = find_family(family).bound
    return _require_kind(found if isinstance(found, type) else _import_class(found), family, kind)


def bind_for_checks(run: Run, kind: type[ModelT]) -> ModelT:
    """Return the model of `run` for checks of its layout and data: one that needs no torch, where its family has such a one.

    kind, errors: as of `bind`.
    """
    checked = find_family(run.model.family).checked
    if checked is None:
        return bind(run, kind)
    use_cache(run.remote.cache, run.remote.cache_gb, run.remote.timeout_s)
    return _require_kind(_import_class(checked), run.model.family, kind)(run)


def _import_class(named: str) -> type:
    module, _, name = named.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def _require_kind(found: type, family: str, kind: type[ModelT]) -> type[ModelT]:
    if not issubclass(found, kind):
        raise ConfigError(kind.absent.format(family=family))
    return found
