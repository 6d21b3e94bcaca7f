"""What our training step does that decides how long it takes: compiled or not, in which formats, by copies or collectives.

The time model is handed such an object; a study of another program may hand it a subclass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.config.model import LanguageModel
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.trace.operations import Operation
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import PartName, Setting, part_tracer


@dataclass(frozen=True)
class FrameworkProfile:
    """How a training program carries out a step. The defaults are those of a compiled step of ours in 16 bits."""

    compiled: bool = True
    """Whether blocks are compiled, so that pointwise work is fused."""
    host_work: float = 1.0
    """What the host does to issue an operation, over what compiled code needs."""
    reduce_bytes: int = 4
    """Bytes of an element of the gradients that data-parallel ranks add up."""
    gather_bytes: int = 2
    """Bytes of an element of the parameters that they gather."""
    gathers_quantised: bool = True
    """Whether they gather weights that are multiplied in 8 bits in these."""
    quantised_bytes: int = 2
    """Bytes of an element of such weights as they are gathered."""
    renewal_bytes: int = 0
    """Bytes read and written once a step for an element of such weights, beside the update."""
    copy_engines: bool = False
    """Whether shards in one node exchange by copies instead of collectives."""
    overlaps_products: bool = False
    """Whether parts of sequences that `tp` exchanges in one node travel by copies beside products."""
    single_rank_overhead: float = 0.25
    """What lies between two steps of a rank that waits for no other, over what lies between those of several ranks: 2.3 ms
    in a trace of one H100 (benchmarks/README.md)."""
    low_precision_copy: bool = True
    """Whether a rank that holds whole parameters, or gathers them once a step, has them in 16 bits and passes their
    gradients on into 32-bit sums."""
    sums_in_products: bool = True
    """Whether products that form gradients of blocks' weights add them to the sums over micro-batches. Ours of 16-bit
    numbers do, but for those of experts."""
    optimizer_bytes: int = 30
    """Bytes an optimizer step reads and writes for each parameter: 32-bit main parameter, two moments and gradient read, all
    but the gradient written, and the 16-bit copy."""

    def computing_in(self, precision: str) -> FrameworkProfile:
        """Return the same program with numbers of `precision`.

        What is gathered and reduced has no fewer bytes than these numbers. In 32 bits and more there is no copy beside the
        main parameters.
        """
        width = PRECISIONS[precision].compute_dtype.itemsize
        # Formats of 16 bits and less change nothing but how weights in 8 bits travel.
        if width <= self.gather_bytes:
            quantised = PRECISIONS[precision].gathered_weight_bytes if self.gathers_quantised else self.gather_bytes
            renewal = self.renewal_bytes if quantised == self.gather_bytes else _RENEWAL_BYTES.get(precision, 0)
            return replace(self, quantised_bytes=quantised, renewal_bytes=renewal)
        return replace(
            self,
            quantised_bytes=width,
            gather_bytes=width,
            reduce_bytes=max(width, self.reduce_bytes),
            low_precision_copy=self.low_precision_copy and width < 4,
            sums_in_products=self.sums_in_products and width < 4,
            optimizer_bytes=self.optimizer_bytes - self.gather_bytes + _ADAMW_VALUE_PASSES * (width - 4),
        )

    def updating_with(self, value_passes: int) -> FrameworkProfile:
        """Return the same program with an optimizer that reads or writes so many values for each parameter."""
        return replace(self, optimizer_bytes=self.optimizer_bytes + 4 * (value_passes - _ADAMW_VALUE_PASSES))

    @property
    def sum_bytes(self) -> int:
        """Bytes read and written to add an element of a micro-batch's gradient to the sum of those before."""
        return self.gather_bytes + 2 * self.reduce_bytes

    @property
    def product_sum_bytes(self) -> int:
        """The same where the product adds it: the sum is read and written in place of a product that is written."""
        in_product = 2 * self.reduce_bytes - self.gather_bytes
        return min(self.sum_bytes, in_product) if self.sums_in_products else self.sum_bytes

    def part_operations(self, name: PartName, setting: Setting, microbatch: int) -> tuple[Operation, ...]:
        """List what a part of the model runs, forward and backward, for a micro-batch of so many samples."""
        return skip_masked(part_costs(name, setting, microbatch).costs.operations, setting)

    def traced_setting(self, setting: Setting) -> Setting:
        """Return the setting whose trace says what is asked of `setting`: operations and parameters."""
        return setting

    def end_costs(self, setting: Setting) -> tuple[float, float]:
        """Return the costs of the embedding and of the head, in blocks: pipeline stages are split by these."""
        return part_tracer(setting).block_costs()


def skip_masked(operations: tuple[Operation, ...], setting: Setting) -> tuple[Operation, ...]:
    """Return the operations of a mean block where windows differ between layers, and FlexAttention skips what they mask."""
    model = setting.model
    if setting.attention != "flex" or not isinstance(model, LanguageModel):
        return operations
    seen = model.attended_share(setting.length, _FLEX_BLOCK)
    if seen == 1.0:
        return operations
    # Ring attention's steps are no causal calls, and all of them run.
    return tuple(
        replace(op, attention=replace(op.attention, seen=seen)) if op.attention and op.attention.causal else op
        for op in operations
    )


_FLEX_BLOCK = 128
"""Keys of a block of FlexAttention's mask, which it computes or skips as a whole."""
_ADAMW_VALUE_PASSES = 7
"""Values that AdamW reads or writes for each parameter: main parameter, two moments and gradient read, all but the gradient
written."""

_RENEWAL_BYTES = {"fp8-row": 9, "fp8-row-experts": 9, "fp8-block": 9}
"""Of weights in 8 bits by precision: read for their largest numbers, read once more, and written. Where a weight has one
scale AdamW does all that as it updates, within the bytes that are counted for a copy in 16 bits."""

COMPILED = FrameworkProfile()
"""Our step with compiled blocks."""
EAGER = replace(COMPILED, compiled=False, host_work=2.0)
"""Our step with blocks that are not compiled."""
