"""A layout made concrete for a world size: degrees, micro-batches and the one function that says whether it is legal."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.check import global_batch_samples
from phalanx.config.schema import Run
from phalanx.errors import ConfigError


@dataclass(frozen=True)
class ResolvedLayout:
    """Degrees whose product is the world size, and the batch arithmetic that follows."""

    dp_replicate: int
    dp_shard: int
    global_batch: int
    """Samples an optimizer step over all ranks."""
    microbatch: int
    """Samples one rank computes at a time."""

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def samples_per_rank(self) -> int:
        """Samples one rank computes an optimizer step."""
        return self.global_batch // self.data_ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches a rank computes an optimizer step."""
        return self.samples_per_rank // self.microbatch


def resolve_layout(run: Run, world_size: int) -> ResolvedLayout:
    """The layout of `run` on `world_size` ranks, `auto` filled in.

    Raises ConfigError, with the numbers and the nearest legal choice, where the degrees do not multiply to the world size
    or the global batch cannot be split evenly.
    """
    layout = run.layout
    shard = layout.dp_shard
    if shard == "auto":
        if world_size % layout.dp_replicate:
            raise ConfigError(
                f"layout.dp_replicate={layout.dp_replicate} does not divide the world size {world_size}\n"
                f"nearest legal: dp_replicate={_nearest_divisor(world_size, layout.dp_replicate)}"
            )
        shard = world_size // layout.dp_replicate
    if layout.dp_replicate * shard != world_size:
        raise ConfigError(
            f"layout.dp_replicate={layout.dp_replicate} x layout.dp_shard={shard} = {layout.dp_replicate * shard} ranks, "
            f"but {world_size} were started\nnearest legal: dp_replicate=1 dp_shard={world_size}, or dp_shard=auto"
        )
    resolved = ResolvedLayout(layout.dp_replicate, shard, global_batch_samples(run), layout.microbatch)
    _check_batch(resolved)
    return resolved


def _check_batch(layout: ResolvedLayout) -> None:
    unit = layout.data_ranks * layout.microbatch
    if layout.global_batch % unit == 0:
        return
    lower = layout.global_batch // unit * unit
    choices = " or ".join(str(batch) for batch in (lower, lower + unit) if batch)
    raise ConfigError(
        f"layout.global_batch={layout.global_batch} samples is not a multiple of layout.microbatch={layout.microbatch} "
        f"x {layout.data_ranks} data-parallel ranks = {unit}\nnearest legal: global_batch={choices}"
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
