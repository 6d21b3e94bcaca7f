"""Layers without attention: linear, normalisation, MLP, and numbered blocks of any. Plain PyTorch for one device.

Parameters are kept in their own (main) format and cast to the format of the activations where they are used, so the same
code runs with float32 main parameters and bfloat16 activations, or with parameters that somebody else has already cast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.layers import MLPConfig, NormConfig
from phalanx.kernels.float8 import QuantisedCopy, measure_copies, power_of_two_scale
from phalanx.kernels.float8_swiglu import quantises_gradients
from phalanx.kernels.parts_sum import add_weight_gradient
from phalanx.kernels.swiglu import gated_linear, swiglu
from phalanx.nn.declared_layers import gate_block
from phalanx.nn.float8_linear import (
    Float8Product,
    GatedPair,
    HeldWeight,
    LinearProduct,
    Operand,
    SequenceExchange,
    takes_rows,
)
from phalanx.nn.precision import Precision
from phalanx.torch_compat import common as compat


class Linear(nn.Module):
    """y = x W^T + b with the parameters cast to the format of x. weight: [out, in], bias: [out] or None.

    With a low-rank adapter (`nn.adapters`), W + adapter_scale B A is in place of W. lora_A: [rank, in], lora_B: [out, rank].
    """

    bias: nn.Parameter | None
    lora_A: nn.Parameter | None
    lora_B: nn.Parameter | None
    adapter_scale = 0.0
    multiply: LinearProduct | None = None
    """Product of the run's precision in place of the plain one; see `choose_products`."""
    held: HeldWeight | None = None
    """The weight as `multiply` reads it, where `quantise_weights` makes that once a step."""
    quantised_copy: QuantisedCopy | None = None
    """What `held` is made of where the whole weight has one scale."""
    gradient_sum: Tensor | None = None
    """The weight's gradients of several micro-batches, [out, in], in a format wider than that of the activations: what
    backward passes add to in place of giving each gradient to autograd. None where autograd gets them."""
    input_group = output_group = ""
    """Names of the groups of ranks over which the features are sharded."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        # Those of the whole layer, of which a rank may hold a part.
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
        else:
            self.register_parameter("bias", None)
        self.register_parameter("lora_A", None)
        self.register_parameter("lora_B", None)

    def forward(self, x: Tensor) -> Tensor:
        """Map x: [..., in] -> [..., out]."""
        return self.join_output(self.product(self.gather_input(x), self.bias))

    @property
    def rows_product(self) -> Float8Product | None:
        """The product, where it takes the weight as rows in 8 bits that are made once a step; else None."""
        product = self.multiply
        return product if isinstance(product, Float8Product) and takes_rows(product.scaling) else None

    @property
    def plain(self) -> bool:
        """Whether the product is that of the weight in the format of the activations alone."""
        return self.multiply is None and self.lora_A is None

    @property
    def sums_gradients(self) -> bool:
        """Whether backward passes can add the weight's gradient to `gradient_sum`: products of 8 bits cannot add."""
        return self.multiply is None and self.weight.requires_grad

    @property
    def exchanges(self) -> tuple[SequenceExchange | None, SequenceExchange | None]:
        """Ranks over which positions of the input are sharded before `gather_input`, of the result after `join_output`."""
        return None, None

    @property
    def exchanges_narrow(self) -> bool:
        """Whether the product gathers its input, or sums its result, itself: what ranks gather has 8 bits then."""
        product = self.multiply
        return isinstance(product, Float8Product) and not (product.gathers is None and product.scatters is None)

    def gather_input(self, x: Tensor) -> Tensor:
        """Return all that the product of this rank reads of x; x itself unless ranks split the layer."""
        return x

    def join_output(self, y: Tensor) -> Tensor:
        """Return the layer's result from the product of this rank; y itself unless ranks split the layer."""
        return y

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + `bias`, which is None where the bias joins later. x: [..., in] -> [..., out]."""
        bias = None if bias is None else bias.to(x.dtype)
        y: Tensor
        if self.multiply is None and self.gradient_sum is not None:
            y = _SummedLinear.apply(x, self.weight.to(x.dtype), bias, self.gradient_sum)
        elif self.multiply is None:
            y = F.linear(x, self.weight.to(x.dtype), bias)
        else:
            y = self.multiply(x, self.weight, bias, self.held)
        if self.lora_A is None or self.lora_B is None:
            return y
        # Through the rank, so that no gradient of the whole matrix is formed.
        narrow = F.linear(x, self.lora_A.to(x.dtype))
        return y + self.adapter_scale * F.linear(narrow, self.lora_B.to(x.dtype))

    def whole_weight(self) -> Tensor:
        """Return the weight, its adapter added, for who multiplies by it other than with `product`: [out, in]."""
        if self.lora_A is None or self.lora_B is None:
            return self.weight
        return self.weight + self.adapter_scale * (self.lora_B @ self.lora_A)


class _SummedLinear(torch.autograd.Function):
    """x W^T + b, whose backward pass adds the gradient of W to a sum (Megatron's `gradient_accumulation_fusion`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient_sum: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, gradient_sum)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gradient_sum = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        add_weight_gradient(gradient_sum, grad_NO, x.reshape(-1, x.shape[-1]))
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, None, grad_NO.sum(0) if ctx.needs_input_grad[2] else None, None


class GatedLinear(Linear):
    """y = swiglu(x) W^T + b, where x holds gate and up features in groups of `block`. weight: [out, in], x: [..., 2 in]."""

    joint_gradients = True
    """Whether one node of the backward pass gives the gradients of input and weight, which takes less memory and time."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, block: int) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.block = block

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return swiglu(x) W^T + `bias`. x: [..., 2 in] -> [..., out]."""
        # The fused kernel forms its product itself: a precision with another one, and an adapter, get the activation and the
        # product apart.
        if not self.joint_gradients or self.multiply is not None or self.lora_A is not None:
            return super().product(swiglu(x, self.block), bias)
        bias = None if bias is None else bias.to(x.dtype)
        return gated_linear(x, self.weight.to(x.dtype), bias, self.block, self.gradient_sum)


def separate_gradients(model: nn.Module) -> None:
    """Give gradients of inputs and of weights nodes of their own in all of `model`, for passes that ask for one of them."""
    for module in model.modules():
        if isinstance(module, GatedLinear):
            module.joint_gradients = False


def choose_products(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Have all linear layers of `model` multiply on `device` as `precision` does, split ones too: each its own part."""
    for module in model.modules():
        if precision.products is not None and isinstance(module, Linear):
            features, groups = (module.in_features, module.out_features), (module.input_group, module.output_group)
            module.multiply = precision.products.of_layer(*features, *groups, device)
            # An adapter reads the input in the format of the activations too.
            if isinstance(module.multiply, Float8Product) and module.lora_A is None:
                module.multiply = module.multiply.over_sequence(*module.exchanges)
    for module in model.modules():
        if isinstance(module, SwigluMLP) and isinstance(module.gate_up.multiply, Float8Product):
            plain = all(layer.bias is None and layer.lora_A is None for layer in (module.gate_up, module.down))
            plain = plain and quantises_gradients(device)
            module.joint_products = module.gate_up.multiply.gated_pair(module.down.multiply) if plain else None


@torch.no_grad()
def quantise_weights(layers: Sequence[Linear], written: Collection[Tensor] = ()) -> None:
    """Make the weights of `layers`, of one recipe, anew in 8 bits; to be called whenever they have changed.

    All ranks over which the layers are sharded call it together: they agree on the scales of all whole weights at once.
    written: what of `quantised_copy` the optimizer has written, with the largest number of each weight.
    """
    products = {layer: product for layer in layers if (product := layer.rows_product) is not None}
    by_tensor = [layer for layer, product in products.items() if product.scaling == "tensor"]
    for layer, product in products.items():
        if product.scaling != "tensor":
            layer.held = product.hold_weight(layer.weight)
    if by_tensor:
        _renew_copies(by_tensor, {layer: products[layer].format for layer in by_tensor}, written)


def _renew_copies(layers: Sequence[Linear], formats: Mapping[Linear, torch.dtype], written: Collection[Tensor]) -> None:
    """Let the copies of weights that have one scale each equal these."""
    copies = []
    for layer in layers:
        if layer.quantised_copy is None:
            layer.quantised_copy = QuantisedCopy.empty(torch.empty_like(layer.weight, dtype=formats[layer]))
            scale = layer.quantised_copy.scale
            # Compilers take no tensor as two arguments of a function with a gradient of its own.
            layer.held = HeldWeight(Operand(layer.quantised_copy.q, scale), scale.clone())
        copies.append(layer.quantised_copy)
    measure_copies([layer.weight for layer in layers], copies, written)
    amaxes = torch.cat([copy.amax for copy in copies])
    # At most one: what is split over no rank has equal values on all.
    for group in {name for layer in layers for name in (layer.input_group, layer.output_group) if name}:
        amaxes = compat.all_reduce(amaxes, group, "max")
    scales = power_of_two_scale(amaxes.bfloat16(), formats[layers[0]]).split(1)
    for layer, copy, scale in zip(layers, copies, scales, strict=True):
        copy.renew(layer.weight, scale)
        assert layer.held is not None
        layer.held.column_scale.copy_(scale)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dim, statistics in at least float32."""

    bias: nn.Parameter | None

    def __init__(self, width: int, *, kind: str, eps: float, bias: bool, offset: bool = False) -> None:
        """Make the parameters. offset: whether normalised features are multiplied by 1 + weight."""
        super().__init__()
        self.kind = kind
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(width))
        if bias and kind == "layernorm":
            self.bias = nn.Parameter(torch.empty(width))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x: [..., width] -> same shape and format."""
        weight = self.factor().to(x.dtype)
        if self.kind == "rmsnorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)

    def factor(self) -> Tensor:
        """Return the factors of normalised features, [width], in the parameters' format."""
        # Added before anything is rounded: 16 bits keep fewer digits of 1 + weight than of the weight.
        return 1.0 + self.weight if self.offset else self.weight


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which is nearly x where x is far below `cap` (Gemma 2, arXiv:2408.00118, section 2)."""
    return cap * torch.tanh(x / cap)


class GeluMLP(nn.Module):
    """down(gelu(up(x))), exact GELU or its tanh form (GPT-2)."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.up = Linear(config.width, config.hidden, bias=config.bias)
        self.down = Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] -> [B, S, D]."""
        hidden: Tensor = self.down(F.gelu(self.up(x_BSD), approximate=self.approximate))
        return hidden


class SwigluMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), gate and up in one matrix; see `gate_block` for its row order."""

    joint_products: GatedPair | None = None
    """Computes both products together, where the run's precision has a way to."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.width, 2 * config.hidden, bias=config.bias)
        self.down = GatedLinear(config.hidden, config.width, bias=config.bias, block=gate_block(config.hidden))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] -> [B, S, D]."""
        if self.joint_products is None:
            hidden: Tensor = self.down(self.gate_up(x_BSD))
            return hidden
        x_BSD = self.gate_up.gather_input(x_BSD)
        first, second = ((layer.weight, layer.held) for layer in (self.gate_up, self.down))
        return self.down.join_output(self.joint_products(x_BSD, first, second, self.down.block))


class GegluMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)) (Shazeer 2020) with the tanh form of GELU; see `gate_block` for the order of rows."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.block = gate_block(config.hidden)
        self.gate_up = Linear(config.width, 2 * config.hidden, bias=config.bias)
        self.down = Linear(config.hidden, config.width, bias=config.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S, D] -> [B, S, D]."""
        gate, up = self.gate_up(x_BSD).unflatten(-1, (-1, 2, self.block)).unbind(-2)
        hidden: Tensor = self.down((F.gelu(gate, approximate="tanh") * up).flatten(-2))
        return hidden


def build_mlp(config: MLPConfig) -> GeluMLP | SwigluMLP | GegluMLP:
    """Return the MLP that `config` asks for."""
    kinds: dict[str, type[GeluMLP] | type[SwigluMLP] | type[GegluMLP]] = {"swiglu": SwigluMLP, "geglu": GegluMLP}
    return kinds.get(config.activation, GeluMLP)(config)


def build_norm(config: NormConfig) -> Norm:
    """Return the norm that `config` asks for."""
    return Norm(config.width, kind=config.kind, eps=config.eps, bias=config.bias, offset=config.offset)


Block = TypeVar("Block", bound=nn.Module)


class NumberedBlocks(nn.Module, Generic[Block]):
    """Consecutive blocks under their numbers in the whole model, so that parameter names do not depend on the part."""

    def __init__(self, make: Callable[[int], Block], numbers: range) -> None:
        super().__init__()
        self.numbers = numbers
        for number in numbers:
            self.add_module(str(number), make(number))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Block]:
        return (self[number] for number in self.numbers)

    def __getitem__(self, number: int) -> Block:
        """Return the block with this number in the whole model."""
        block: Block = self._modules[str(number)]  # type: ignore[assignment]
        return block
