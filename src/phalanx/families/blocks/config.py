"""The `data` section of run files of families that read a data source of their own; see `data.sources`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phalanx.config.model import BlockModel
from phalanx.config.schema import Run
from phalanx.config.section import Positions, Section


class SourceData(Section):
    """What the model is trained on: a data source by name, with what it is told."""

    source: str
    """Name of the data source: an entry point of `phalanx.data_sources`, or one that was registered."""
    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """What the source is told; each source says what it knows."""
    sequence_length: Positions
    """Positions a sample."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """Batches read ahead in the background; 0 reads in the training loop."""


class BlockRun(Run):
    """A run of a family of blocks; a family's own kind names the type of its `model`."""

    model: BlockModel
    data: SourceData

    @property
    def data_names(self) -> list[str]:
        """See `Run`."""
        return [self.data.source]
