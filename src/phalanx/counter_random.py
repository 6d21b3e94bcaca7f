"""Random numbers as a pure function of a counter: no generator state, so no order, rank or device can change them.

Knows nothing of models or layouts. Integer arithmetic alone, on int64 tensors that wrap like unsigned 64-bit words.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16):
word i of a stream is mix(start + i * step), where mix is a bijection of 64-bit words and every stream has its own start
and its own odd step, as that paper's split generators have. The step keeps two streams from being the same sequence
at different places. It costs 14 integer operations a word, which a device does at the speed of its memory.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Stream(NamedTuple):
    """One sequence of 2^64 random words. Both numbers are signed 64-bit; `step` is odd."""

    start: int
    step: int


def stream(seed: int, *labels: str | int) -> Stream:
    """The stream that belongs to `seed` and `labels`: the same everywhere and always, unrelated for any other labels."""
    text = repr((seed, *labels)).encode()
    digest = hashlib.sha256(text).digest()
    return Stream(_signed(int.from_bytes(digest[:8], "little")), _signed(_odd_step(int.from_bytes(digest[8:16], "little"))))


def random_words(index: Tensor, source: Stream) -> Tensor:
    """Words of `source` at `index`, int64 of any shape: int64 of the same shape, every one of the 64 bits fair."""
    return mix(index * source.step + source.start)


def mix(x: Tensor) -> Tensor:
    """A bijection of 64-bit words, int64 in and out, in which every input bit flips each output bit half of the time.

    Stafford's variant 13 of the MurmurHash3 finaliser, as in SplitMix64.
    """
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


class DropoutContext(NamedTuple):
    """What makes each dropout decision of one forward pass unique, whatever this rank's part of the batch is.

    token_keys_BS: int64, one random word for each token, a function of seed, step, global sample and global position. It
    splits over batch and sequence as the tokens themselves do.
    """

    token_keys_BS: Tensor

    @classmethod
    def of_step(cls, seed: int, step: int, sample_indices_B: Tensor, positions_S: Tensor) -> DropoutContext:
        """Keys of optimizer step `step` for samples with these global indices at these global positions, both int64."""
        source = stream(seed, "dropout", step)
        sample_keys_B = random_words(sample_indices_B, source)
        return cls(mix(sample_keys_B[:, None] + positions_S * source.step))

    def for_block(self, index: int) -> DropoutContext:
        """The context of block `index`, in which each block may number its own dropouts from 0.

        A compiled block treats its layer numbers as constants, so blocks that are to share one compiled program must not
        differ in them: they get their number here, outside the program, instead.
        """
        return DropoutContext(mix(self.token_keys_BS + index))


class CounterDropout(nn.Module):
    """Dropout whose decisions are a function of seed, step, layer, sample, position and channel; see `counter_dropout`.

    layer_id: tells apart the dropouts that see the same context.
    channel_offset: global index of this rank's first channel; set by whoever splits the channels.
    """

    def __init__(self, p: float, layer_id: int, channel_offset: int = 0) -> None:
        super().__init__()
        assert 0.0 <= p < 1.0
        self.p = p
        self.layer_id = layer_id
        self.channel_offset = channel_offset

    def forward(self, x_BSD: Tensor, context: DropoutContext | None = None) -> Tensor:
        """[B, S, D] -> same shape and format. The identity in evaluation mode, with p = 0, and without a context."""
        if context is None or not self.training or self.p == 0.0:
            return x_BSD
        return counter_dropout(
            x_BSD, self.p, context.token_keys_BS, layer_id=self.layer_id, channel_offset=self.channel_offset
        )

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"p={self.p}, layer_id={self.layer_id}"


def counter_dropout(
    x_BSD: Tensor, p: float, token_keys_BS: Tensor, *, layer_id: int = 0, channel_offset: int = 0
) -> Tensor:
    """Zero each element with probability `p` and scale the others by 1 / (1 - p).

    x_BSD: activations of any floating format. token_keys_BS: int64, see `DropoutContext`. layer_id: below 2^31.
    channel_offset: global index of channel 0 of x_BSD.
    The decision on an element depends on its token's key, the layer and the global channel, so neither splitting the
    tensor along any dim nor computing it twice changes it. Compiled, it is part of the kernel around it.
    """
    first = (layer_id << 32) + channel_offset
    counter_D = torch.arange(first, first + x_BSD.shape[-1], device=x_BSD.device)
    words_BSD = mix(token_keys_BS[..., None] + counter_D * _GOLDEN)
    keep_BSD = words_BSD >= _signed(round(p * 2**64) + 2**63)
    return torch.where(keep_BSD, x_BSD * (1.0 / (1.0 - p)), 0.0)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Unsigned right shift; that of int64 tensors repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _odd_step(word: int) -> int:
    """The odd number nearest above `word`, with enough changes between neighbouring bits (the paper's mixGamma)."""
    odd = word | 1
    return odd if (odd ^ (odd >> 1)).bit_count() >= 24 else odd ^ 0xAAAAAAAAAAAAAAAA


def _signed(word: int) -> int:
    """The number that an int64 with the low 64 bits of `word` holds."""
    return (word + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
