"""A rule of legality: a predicate over a table of layouts, with its message and its fixes; and the facts it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx.config.schema import Run
from phalanx.families.family import BoundModel
from phalanx.layout.spec import Bools, LayoutTable, ResolvedLayout
from phalanx.nn.splits import SplitCount

Fix = dict[str, int | str | bool | None]
"""Fields of the run file, as `section.field`, with other values."""


@dataclass(frozen=True)
class Requirements:
    """Facts about a run on a number of ranks that rules compare layouts with; its model is asked once for all layouts."""

    model: BoundModel
    world_size: int
    devices_per_node: int | None
    """None where nobody says it."""
    axes: frozenset[str]
    """Degrees that may be more than 1."""
    experts: SplitCount | None
    """Experts of each mixture, which `ep` shards; None where there are none."""
    expert_slices: SplitCount
    """Parts of an expert that stay together, which `expert_tp` shards; 1 where there are no experts."""
    counts_sequences: str
    """The field of the model, with its value, that needs whole sequences on a rank; empty where there is none."""
    streams_weights: bool
    """Whether the model has projection pairs to stream."""
    offloads_activations: bool
    """Whether activations of its blocks may lie in host memory."""
    unstreamable: str
    """The field of the model, with its value, that keeps them from being streamed; empty where there is none."""
    split_counts: list[SplitCount]
    """Counts that a tensor-parallel degree must divide."""
    split_rows: SplitCount | None
    """Rows of a table that tensor-parallel ranks may share unevenly."""
    positions: SplitCount
    """Positions of a sample."""
    context_heads: SplitCount
    """Heads that Ulysses (`context: all_to_all`) spreads over `tp` and `cp`."""
    tied: bool
    """Whether embedding and head share parameters."""

    @property
    def run(self) -> Run:
        """The run file."""
        return self.model.run

    @classmethod
    def of_model(cls, model: BoundModel, world_size: int, devices_per_node: int | None = None) -> Requirements:
        """Ask `model`. devices_per_node: what the launcher says; the run file's own word comes first."""
        return cls(
            model=model,
            world_size=world_size,
            devices_per_node=model.run.cluster.devices_per_node or devices_per_node,
            axes=model.axes,
            experts=model.experts(),
            expert_slices=model.expert_slices(),
            counts_sequences=model.counts_sequences(),
            streams_weights=model.streams_weights,
            offloads_activations=model.offloads_activations,
            unstreamable=model.unstreamable(),
            split_counts=model.split_counts(),
            split_rows=model.split_rows(),
            positions=model.positions(),
            context_heads=model.context_heads(),
            tied=bool(model.tied()),
        )


@dataclass(frozen=True)
class Reason:
    """Why one layout is not legal."""

    text: str
    """A sentence, or one on each line, that names the fields and their numbers."""
    fixes: tuple[Fix, ...] = ()
    """Changes of which each may mend the layout without other degrees."""


@dataclass(frozen=True)
class Rule:
    """One thing that makes layouts illegal."""

    reads: tuple[str, ...]
    """Fields of a layout that decide whether it breaks the rule."""
    broken: Callable[[Requirements, LayoutTable], Bools | bool]
    """Where layouts break the rule, [layouts]; or one answer for all of them."""
    message: str | Callable[[Requirements, ResolvedLayout], str]
    """A text in which `{x.FIELD}` is a field of the layout, `{needs.FIELD}` one of the requirements; or what writes it."""
    fixes: tuple[Fix, ...] | Callable[[ResolvedLayout], Iterable[Fix]] = ()
    """Fixes, as for `Reason`, or the function that finds them."""

    def explain(self, needs: Requirements, layout: ResolvedLayout) -> Reason:
        """Return why `layout` breaks this rule, and what would mend it."""
        fixes = tuple(self.fixes(layout)) if callable(self.fixes) else self.fixes
        return Reason(self.describe(needs, layout), fixes)

    def describe(self, needs: Requirements, layout: ResolvedLayout) -> str:
        """Return the text of the reason alone: looking for fixes takes longer."""
        if isinstance(self.message, str):
            return self.message.format(x=layout, needs=needs)
        return self.message(needs, layout)
