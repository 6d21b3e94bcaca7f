"""Checks for `phalanx config check` what the run file's own rules do not: the layout's legality, and the data.

Torch is loaded only for what asks for it: families that have no checks without it, optimizers and callbacks of packages,
weights that a run begins with, and fields that name parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from phalanx.config.schema import OWN_OPTIMIZERS, Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.family import BoundModel, DataModel
from phalanx.families.registry import bind, bind_for_checks
from phalanx.layout.resolve import can_run, resolve_layout, stated_ranks
from phalanx.layout.spec import DEGREES, ResolvedLayout

_TRIED = 64
"""Multiples of the least number of ranks that are tried where no number is given: a batch may only divide over some."""


def check_layout_and_data(run: Run, ranks: int | None, *, data: bool) -> dict[str, Any]:
    """Return the layout, its ranks and the data as text, and the rows of `transfer_rows`; None for data not looked for.

    ranks: None takes the fewest that the degrees allow. Raises ConfigError with everything that is wrong.
    """
    model = bind_for_checks(run, BoundModel)
    summary: dict[str, Any] = {"ranks": None, "layout": None, "data": None, "transfer": []}
    wrong: list[str] = []
    try:
        layout = resolve_layout(model, ranks) if ranks is not None else _resolve_on_fewest(model)
        words = layout.in_words(run.layout)
        count = layout.world_size
        summary |= {"ranks": count, "layout": words if count == 1 else f"{count:,} ranks: {words}"}
    except PhalanxError as error:
        wrong.append(str(error))
    # Each on its own, so that one command tells everything that is wrong.
    extensions: list[Callable[[], object]] = []
    if run.optimizer.name not in OWN_OPTIMIZERS:
        extensions.append(partial(import_module("phalanx.optimizers").find_optimizer, run.optimizer))
    if run.training.callbacks:
        extensions.append(partial(import_module("phalanx.training.callbacks").build_callbacks, run.training.callbacks))
    for look_up in extensions:
        try:
            look_up()
        except PhalanxError as error:
            wrong.append(str(error))
    if data:
        try:
            summary["data"] = bind_for_checks(run, DataModel).check_inputs()
            summary["transfer"] = _check_parameters(run)
        except PhalanxError as error:
            wrong.append(f"{error}\ndata on another machine: leave them out with --no-data")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return summary


def _check_parameters(run: Run) -> list[tuple[str, ...]]:
    """Return what a run takes of the weights that it begins with, parameter by parameter; nothing where there are none."""
    if not run.names_parameters:
        return []
    transfer = import_module("phalanx.training.transfer")
    model = bind(run, import_module("phalanx.training.inputs").TrainableModel)
    rows: list[tuple[str, ...]] = transfer.transfer_rows(model, transfer.plan_transfer(model))
    return rows


def _resolve_on_fewest(model: BoundModel) -> ResolvedLayout:
    """Return the layout on the fewest ranks on which it is legal. Raises ConfigError where it is legal on none."""
    least = stated_ranks(model.run)
    more = any(getattr(model.run.layout, name) == "auto" for name in DEGREES)
    tried = (least * multiple for multiple in range(1, _TRIED + 1 if more else 2))
    return resolve_layout(model, next((ranks for ranks in tried if can_run(model, ranks)), least))
