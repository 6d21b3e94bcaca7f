"""How a training program does what every layout needs done: a few switches, for ours and for those of published runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.precision import PRECISIONS


@dataclass(frozen=True)
class Software:
    """The switches; their plain values are what our own training does."""

    compiled: bool = True
    """Whether blocks are compiled, so that pointwise work is fused."""
    eager_traffic: bool = True
    """Whether blocks that are not compiled pass more slowly over memory than compiled ones. Constants that were fitted to
    published runs of programs that compile nothing hold it already."""
    host_work: float = 1.0
    """What the host does to issue an operation, over what compiled code needs."""
    host_exchanges: bool = True
    """Whether exchanges cost the host what they do in our training: each collective of activations is called from Python,
    and each parameter is gathered and reduced by itself, as FSDP2 does it. Else next to nothing."""
    fused_attention: bool = True
    """Whether scores stay on the chip; else they are written, and pass through memory several times."""
    attention_dropout: bool = False
    """Whether scores pass through memory once more for dropout; of no meaning with fused attention."""
    fused_residual: bool = False
    """Whether a bias behind a row-split matrix is added in the same pass as the residual, though nothing is compiled."""
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks share out what lies between the matmuls; else they sum whole activations, and each
    computes norms and sums of all positions."""
    plain_recompute: bool = False
    """Whether recomputing a block runs all of its forward pass again, and `selective` the attention core alone; else what
    our own recompute does."""
    reduce_bytes: int = 4
    """Bytes of an element of the gradients that data-parallel ranks add up."""
    gather_bytes: int = 2
    """Bytes of an element of the parameters that they gather."""
    overlap: bool = True
    """Whether data-parallel communication runs behind computing; else it comes after it."""
    reshard: bool = True
    """Whether ZeRO-3 frees a block's parameters between forward and backward; else the layout says so."""
    even_stages: bool = False
    """Whether all pipeline stages have equally many blocks, whatever the embedding and the head cost."""
    copy_engines: bool = False
    """Whether shards in one node exchange by copies instead of collectives."""
    chunked_loss: bool = True
    """Whether the head's logits exist for some tokens at a time."""
    step_alone: float = 0.25
    """What lies between two steps of a rank that waits for no other, over what programs take that read each step's loss
    before they begin the next: 2.3 ms in a trace of one H100 (benchmarks/README.md)."""
    working_copy: bool = True
    """Whether a rank that holds whole parameters, or gathers them once a step, has them in 16 bits and passes their
    gradients on into 32-bit sums."""
    optimizer_bytes: int = 30
    """Bytes an optimizer step reads and writes for each parameter: 32-bit master, two moments and gradient read, all but
    the gradient written, and the 16-bit copy."""

    def computing_in(self, precision: str) -> Software:
        """The same with numbers of `precision`: what is gathered and reduced has no less than their bytes. Of 32 bits and
        more there is no copy beside the master."""
        width = PRECISIONS[precision].compute_dtype.itemsize
        if width <= self.gather_bytes:
            return self
        return replace(
            self,
            gather_bytes=width,
            reduce_bytes=max(width, self.reduce_bytes),
            working_copy=self.working_copy and width < 4,
            optimizer_bytes=self.optimizer_bytes - self.gather_bytes + _PASSES * (width - 4),
        )

    def updating_with(self, value_passes: int) -> Software:
        """The same with an optimizer that reads or writes so many values for each parameter."""
        return replace(self, optimizer_bytes=self.optimizer_bytes + 4 * (value_passes - _PASSES))


_PASSES = 7
"""Values that AdamW reads or writes for each parameter: main parameter, moments and gradient read, all but the gradient
written."""


OURS = Software(reshard=False)
EAGER = replace(OURS, compiled=False, host_work=2.0)
"""Our own, uncompiled."""

_MEGATRON = Software(
    compiled=False,
    eager_traffic=False,
    host_work=3.0,
    host_exchanges=False,
    fused_attention=False,
    attention_dropout=True,
    fused_residual=True,
    sequence_parallel=False,
    plain_recompute=True,
    reduce_bytes=2,
    overlap=False,
    even_stages=True,
    chunked_loss=False,
    step_alone=1.0,
    working_copy=False,
    optimizer_bytes=46,
)
"""Gradients are copied to 32-bit and checked for overflow on their way to the optimizer."""

_FSDP = Software(
    compiled=False,
    eager_traffic=False,
    host_work=2.0,
    host_exchanges=False,
    plain_recompute=True,
    reduce_bytes=2,
    chunked_loss=False,
    step_alone=1.0,
    working_copy=False,
)

_KNOWN: tuple[tuple[str, Software], ...] = (
    ("llm foundry", _FSDP),
    ("hf accelerate", _FSDP),
    ("torchtitan", replace(_FSDP, compiled=True, host_work=1.0, host_exchanges=True, reduce_bytes=4)),
    ("nanotron", replace(_MEGATRON, fused_attention=True, reduce_bytes=4)),
    ("megatron-lm", replace(_MEGATRON, reduce_bytes=4)),
    ("megatron-deepspeed", _MEGATRON),
    ("gpt-neox", _MEGATRON),
    ("phalanx", OURS),
)
"""By what the lower-case name of a program begins with."""


def software_of(name: str, attention: str = "", sequence_parallel: bool | None = None) -> Software | None:
    """What the program called `name` does, with the attention kernel and the sequence parallelism that a source states
    (empty and None where it does not); None for a program that is not known."""
    found = next((software for start, software in _KNOWN if name.lower().startswith(start)), None)
    if found is None:
        return None
    words = attention.lower()
    if words and "no flash" not in words and ("flash" in words or "sdpa" in words):
        found = replace(found, fused_attention=True)
    elif "unfused" in words or "no flash" in words:
        found = replace(found, fused_attention=False)
    return found if sequence_parallel is None else replace(found, sequence_parallel=sequence_parallel)
