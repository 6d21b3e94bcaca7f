"""Checks for `phalanx config check` what the run file's own rules do not: the layout's legality, and the data."""

from __future__ import annotations

from functools import partial
from typing import Any

from phalanx.config.schema import Run
from phalanx.errors import ConfigError, PhalanxError
from phalanx.families.family import BoundModel
from phalanx.families.registry import bind
from phalanx.layout.resolve import can_run, resolve_layout, stated_ranks
from phalanx.layout.spec import DEGREES, ResolvedLayout
from phalanx.optimizers import find_optimizer
from phalanx.training.callbacks import build_callbacks
from phalanx.training.inputs import TrainableModel
from phalanx.training.transfer import plan_transfer, transfer_rows

_TRIED = 64
"""Multiples of the least number of ranks that are tried where no number is given: a batch may only divide over some."""


def check_layout_and_data(run: Run, ranks: int | None, *, data: bool) -> dict[str, Any]:
    """Return the layout, its ranks and the data as text, and the rows of `transfer_rows`; None for data not looked for.

    ranks: None takes the fewest that the degrees allow. Raises ConfigError with everything that is wrong.
    """
    model = bind(run)
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
    for look_up in (partial(find_optimizer, run.optimizer), partial(build_callbacks, run.training.callbacks)):
        try:
            look_up()
        except PhalanxError as error:
            wrong.append(str(error))
    if data:
        try:
            trained = bind(run, TrainableModel)
            summary["data"] = trained.check_inputs()
            summary["transfer"] = transfer_rows(trained, plan_transfer(trained))
        except PhalanxError as error:
            wrong.append(f"{error}\ndata on another machine: leave them out with --no-data")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return summary


def _resolve_on_fewest(model: BoundModel) -> ResolvedLayout:
    """Return the layout on the fewest ranks on which it is legal. Raises ConfigError where it is legal on none."""
    least = stated_ranks(model.run)
    more = any(getattr(model.run.layout, name) == "auto" for name in DEGREES)
    tried = (least * multiple for multiple in range(1, _TRIED + 1 if more else 2))
    return resolve_layout(model, next((ranks for ranks in tried if can_run(model, ranks)), least))
