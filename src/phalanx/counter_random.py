"""Random numbers that are a function of a counter: no generator state, so nothing depends on who draws first.

The bits come from integer arithmetic and are the same on every device type. Normal values are made from them with float64
additions, multiplications and divisions alone, issued as separate kernels: those are correctly rounded by IEEE 754
everywhere, where the logarithms, cosines and even square roots of different devices are not. Uncompiled use of
`normal_values` is part of that promise (a compiler may contract a product and a sum into one rounding); the dropout below is
integer work only and may be compiled.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn


def _as_signed(value: int) -> int:
    """Return the int64 with the bits of the unsigned 64-bit `value`; torch has no unsigned 64-bit arithmetic."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _as_signed(0x9E3779B97F4A7C15)
_MIX_1 = _as_signed(0xBF58476D1CE4E5B9)
_MIX_2 = _as_signed(0x94D049BB133111EB)
_POSITION = _as_signed(0xD1B54A32D192ED03)


def stable_key(*parts: object) -> int:
    """Return an unsigned 64-bit key made from the text of `parts`: the same in every process, on every machine, for ever."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def stream_key(*parts: object) -> int:
    """Return the same key as a signed number, as tensors hold it."""
    return _as_signed(stable_key(*parts))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of `x`: torch's is arithmetic on int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_bits(x: Tensor) -> Tensor:
    """Return well-spread 64 bits for each int64 of `x`: SplitMix64's finalizer (Steele, Lea & Flood 2014, figure 16)."""
    x = (x ^ _shift_right(x, 30)).mul_(_MIX_1)
    x = x.bitwise_xor_(_shift_right(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 31))


def random_bits(key: int, counter: Tensor) -> Tensor:
    """Return 64 random bits for each int64 `counter` of stream `key`: the outputs of SplitMix64 started at the key."""
    return mix_bits((counter * _GOLDEN).add_(key))


def uniform_values(key: int, counter: Tensor) -> Tensor:
    """Return float64 values in (0, 1), the midpoints of 2^52 equal intervals, for each int64 `counter`."""
    return _shift_right(random_bits(key, counter), 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def normal_values(key: int, counter: Tensor) -> Tensor:
    """Return standard normal float64 values for each int64 `counter`, by inverting the normal distribution function.

    Wichura (1988), algorithm AS 241 (PPND16), accurate to about 1e-16.
    """
    q = uniform_values(key, counter).sub_(0.5)
    values = _polynomial_ratio((q * q).neg_().add_(0.180625), _CENTRAL).mul_(q)
    tail = torch.nonzero(q.abs() > 0.425, as_tuple=True)
    # Exact: the uniform values and their distance to 0.5 are both multiples of 2^-53 below 1.
    values[tail] = _tail_values(q[tail].add_(0.5))
    return values


def _tail_values(p: Tensor) -> Tensor:
    distance = _square_root(_natural_log(torch.minimum(p, 1.0 - p)).neg_())
    values = _polynomial_ratio(distance - 1.6, _MIDDLE)
    # One value in 36 billion.
    far = torch.nonzero(distance > 5.0, as_tuple=True)
    values[far] = _polynomial_ratio(distance[far] - 5.0, _FAR)
    return values.copysign_(p - 0.5)


def _polynomial_ratio(x: Tensor, coefficients: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Return the quotient of two polynomials, highest power first, by Horner's rule."""
    top, bottom = (_evaluate_polynomial(x, c) for c in coefficients)
    return top.div_(bottom)


def _evaluate_polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[-1])


def _square_root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of float64 `x`, of about 1.

    PyTorch's of the CPU is MKL's, whose last bit depends on the processor. One step of Newton's method from there, with
    the exact remainder x - root^2 by Dekker's product (1971), ends at the same value from either neighbour.
    """
    root = x.sqrt()
    square = root * root
    high = root * (2.0**27 + 1.0)
    high = high - (high - root)
    low = root - high
    lost = (high * high - square).add_((high * low).mul_(2.0)).add_(low * low)
    return (x - square).sub_(lost).div_(root * 2.0).add_(root)


def _natural_log(x: Tensor) -> Tensor:
    """Return the natural logarithm of float64 `x` in (0, 1).

    Exponent times ln 2, plus the series of 2 atanh((m - 1) / (m + 1)) of the mantissa m.
    """
    mantissa, exponent = torch.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent - small.to(exponent.dtype)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _evaluate_polynomial(s * s, tuple(1.0 / n for n in range(25, 0, -2)))
    return exponent.to(torch.float64) * 0.6931471805599453 + series * s * 2.0


_CENTRAL = (
    (
        2509.0809287301226727,
        33430.575583588128105,
        67265.770927008700853,
        45921.953931549871457,
        13731.693765509461125,
        1971.5909503065514427,
        133.14166789178437745,
        3.387132872796366608,
    ),
    (
        5226.495278852545925,
        28729.085735721942674,
        39307.89580009271061,
        21213.794301586595867,
        5394.1960214247511077,
        687.1870074920579083,
        42.313330701600911252,
        1.0,
    ),
)
_MIDDLE = (
    (
        7.7454501427834140764e-4,
        0.0227238449892691845833,
        0.24178072517745061177,
        1.27045825245236838258,
        3.64784832476320460504,
        5.7694972214606914055,
        4.6303378461565452959,
        1.42343711074968357734,
    ),
    (
        1.05075007164441684324e-9,
        5.475938084995344946e-4,
        0.0151986665636164571966,
        0.14810397642748007459,
        0.68976733498510000455,
        1.6763848301838038494,
        2.05319162663775882187,
        1.0,
    ),
)
_FAR = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        0.0012426609473880784386,
        0.026532189526576123093,
        0.29656057182850489123,
        1.7848265399172913358,
        5.4637849111641143699,
        6.6579046435011037772,
    ),
    (
        2.04426310338993978564e-15,
        1.4215117583164458887e-7,
        1.8463183175100546818e-5,
        7.868691311456132591e-4,
        0.0148753612908506148525,
        0.13692988092273580531,
        0.59983220655588793769,
        1.0,
    ),
)


class DropoutContext(NamedTuple):
    """What decides which activations a forward pass drops, besides the place of the dropout in the model.

    Everything that counts upwards is multiplied here, outside of compiled code. Inductor takes whole numbers that it
    counts itself for positions in memory, which never leave 64 bits, and on a GPU 32: it neither wraps their products
    modulo 2^64 nor keeps the C++ compiler from assuming that a loop ends before they would have to be.
    """

    key: Tensor
    """int64, 0-dim: a function of seed and step, and of the layer once `at_layer` was called."""
    sample_indices_B: Tensor
    """int64: global sample numbers."""
    rows_BS: Tensor
    """int64: a number for each global sample and global position in the sequence."""
    channels_D: Tensor
    """int64: a number for each channel."""

    @classmethod
    def of_step(cls, seed: int, step: int, sample_indices_B: Tensor, positions_S: Tensor, width: int) -> DropoutContext:
        """Return the context of one optimizer step.

        sample_indices, positions: int64, global numbers of what this rank computes. width: channels of an activation.
        """
        device = sample_indices_B.device
        key = torch.tensor(stream_key("dropout", seed, step), device=device)
        rows_BS = sample_indices_B[:, None] * _GOLDEN + positions_S[None, :] * _POSITION
        return cls(key, sample_indices_B, rows_BS, torch.arange(width, device=device) * _GOLDEN)

    def at_layer(self, layer: int) -> DropoutContext:
        """Return the context of one layer. The layer goes into a tensor, so equal layers share one compiled program."""
        return self._replace(key=mix_bits(self.key + _as_signed(((layer + 1) * _POSITION) % (1 << 64))))


class CounterDropout(nn.Module):
    """Dropout whose decision for each element is a function of (seed, step, layer, site, sample, position, channel).

    It is therefore the same however samples, positions and layers are spread over ranks and micro-batches, and the same
    when activations are computed again. site: distinguishes several dropouts of one layer.
    """

    def __init__(self, p: float, *, site: int) -> None:
        super().__init__()
        self.p = p
        self.site = site

    def forward(self, x_BSD: Tensor, context: DropoutContext | None) -> Tensor:
        """Drop with probability p and scale the rest by 1 / (1 - p); identity when p is 0, or without a context."""
        if self.p == 0.0 or context is None:
            return x_BSD
        row_BS = mix_bits(context.key + self.site + context.rows_BS)
        bits_BSD = _shift_right(mix_bits(row_BS[..., None] + context.channels_D), 33)
        kept_BSD = bits_BSD >= int(self.p * 2**31)
        # A choice, not a product: one byte an element is kept for backward, and what is dropped spreads no NaN.
        return torch.where(kept_BSD, x_BSD * (1.0 / (1.0 - self.p)), 0.0)


def member_normals(key: int, sample_indices_B: Tensor, members: int, counters: Tensor) -> Tensor:
    """Return nearly normal values of mean 0 and variance 1, float32 [B, members, *counters.shape].

    Each is a function of (key, sample, member, counter). It is the sum of four uniform values of 16 bits (kurtosis 2.7, at
    most 3.46 in size): integer work but for the last product, so it may be compiled and traced, which `normal_values` may
    not.
    """
    members_M = torch.arange(members, device=sample_indices_B.device)
    streams_BM = mix_bits(mix_bits(sample_indices_B * _GOLDEN + key)[:, None] + members_M * _GOLDEN)
    bits = mix_bits(streams_BM.view(*streams_BM.shape, *[1] * counters.dim()) + counters * _GOLDEN)
    total = (bits & 0xFFFF) + (_shift_right(bits, 16) & 0xFFFF) + (_shift_right(bits, 32) & 0xFFFF)
    total = total + _shift_right(bits, 48) - 2 * 0xFFFF
    # A uniform value of 16 bits has the variance (2^32 - 1) / 12.
    return total.to(torch.float32).mul(((2**32 - 1) / 3) ** -0.5)


def sample_bits(what: str, numbers: Tensor, count: int) -> Tensor:
    """Return non-negative random integers [samples, count]: a function of `what` and of each sample's number alone.

    For samples that verification makes up. numbers: int64 [samples].
    """
    # Without the sign: the remainder of a negative number is negative.
    return random_bits(stream_key("verify", what), _sample_counters(numbers, count)).bitwise_and((1 << 62) - 1)


def sample_normals(what: str, numbers: Tensor, count: int) -> Tensor:
    """Return normal values, float64 [samples, count]; see `sample_bits`."""
    return normal_values(stream_key("verify", what), _sample_counters(numbers, count))


def _sample_counters(numbers: Tensor, count: int) -> Tensor:
    # Each sample has counters of its own, 2**32 of them, whichever others are asked for beside it.
    return numbers[:, None] * (1 << 32) + torch.arange(count)
