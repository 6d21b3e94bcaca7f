"""Number formats of a run, by the names that run files give them (`layout.precision`), and what each of them is for.

Layers cast their parameters to the format of the activations where they use them, so that one rank and sharded ranks run the
same model code; which format that is stands here, and nowhere else. A recipe that multiplies in a narrower format than its
activations have, as FP8 does, is another `Precision`: it brings `products`, which the linear layers of blocks then call.
Embedding, head, router, norms and attention between its projections stay in the format of the activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from phalanx.errors import ConfigError
from phalanx.kernels.grouped_products import GroupedProducts
from phalanx.nn.float8_linear import Float8Recipe, LinearProduct, takes_rows
from phalanx.torch_compat import common as compat


class LayerProducts(Protocol):
    """Chooses the product of each linear layer, and of experts."""

    def of_layer(
        self, in_features: int, out_features: int, input_group: str, output_group: str, device: torch.device
    ) -> LinearProduct | None:
        """Return the product of a layer with so many features on `device`; None for the plain one.

        in_features, out_features: of the whole layer. input_group, output_group: names of the groups of ranks that share
        them out; "" for none.
        """

    def of_experts(self, d_model: int, d_ff: int, device: torch.device) -> GroupedProducts:
        """Return the products of experts of this width and hidden width on `device`."""


@dataclass(frozen=True)
class Precision:
    """The formats that a run computes, keeps and reduces numbers in."""

    name: str
    """Name in run files."""
    compute_dtype: torch.dtype
    """Format of activations, of their gradients, and of parameters while they are used."""
    main_dtype: torch.dtype
    """Format of main parameters, which the optimizer updates, and of the optimizer's state."""
    reduce_dtype: torch.dtype
    """Format of parameters' gradients as they are summed over micro-batches and ranks."""
    products: LayerProducts | None = None
    """Differentiable products of the layers of blocks; None for the plain ones."""

    @property
    def copies_parameters(self) -> bool:
        """Whether parameters are computed with in another format than they are kept in."""
        return self.compute_dtype != self.main_dtype

    @property
    def exchanges_in_products(self) -> bool:
        """Whether products may gather their inputs and sum their results over ranks part by part, or in 8 bits."""
        return self.products is None or (isinstance(self.products, Float8Recipe) and self.products.scaling == "tensor")

    @property
    def gathered_weight_bytes(self) -> int:
        """Bytes of a number of the weights that `products` multiply, as data-parallel ranks gather them."""
        in_rows = isinstance(self.products, Float8Recipe) and takes_rows(self.products.scaling)
        return 1 if in_rows else self.compute_dtype.itemsize


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp64", torch.float64, torch.float64, torch.float64),
        Precision("fp32", torch.float32, torch.float32, torch.float32),
        Precision("bf16", torch.bfloat16, torch.float32, torch.float32),
        Precision("fp16", torch.float16, torch.float32, torch.float32),
        *(
            Precision(name, torch.bfloat16, torch.float32, torch.float32, products=recipe)
            for name, recipe in {
                "fp8-tensor": Float8Recipe("tensor"),
                "fp8-row": Float8Recipe("row"),
                "fp8-row-experts": Float8Recipe("row", experts=True),
                "fp8-block": Float8Recipe("block"),
                "mxfp8": Float8Recipe("mx"),
            }.items()
        ),
    )
}
"""Every precision that `layout.precision` may name."""
NUMBER_FORMATS = {
    precision.name: precision.compute_dtype for precision in PRECISIONS.values() if not precision.products
}
"""The formats that a trained model may compute in: recipes of training are none."""


def find_precision(name: str, gradients: str = "e4m3") -> Precision:
    """Return the precision that a run file names. gradients: 8-bit format of gradients, of recipes that have one."""
    precision = PRECISIONS[name]
    if isinstance(precision.products, Float8Recipe):
        recipe = replace(precision.products, wide_gradients=gradients == "e5m2")
        return replace(precision, products=recipe)
    return precision


def require_products(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError where the accelerator `device` has no products of `precision`; the CPU computes all of them."""
    if not isinstance(precision.products, Float8Recipe) or device.type == "cpu":
        return
    recipe, refusal = precision.products, compat.float8_refusal(device)
    nearest = "bf16" if refusal else "fp8-block"
    if recipe.scaling == "mx":
        refusal = (
            "blocks of 32 need products of microscaling formats, which are emulated on the CPU and on no accelerator"
        )
    elif recipe.experts and not refusal:
        refusal, nearest = compat.grouped_float8_refusal(device), "fp8-row"
        if recipe.wide_gradients and not refusal:
            refusal = "its grouped products take no gradients of layout.fp8_gradients=e5m2"
    if refusal:
        raise ConfigError(
            f"layout.precision={precision.name} cannot be computed on this device: {refusal}\n"
            f"set layout.precision={nearest}"
        )


def find_number_format(name: str | None, option: str) -> torch.dtype | None:
    """Return the number format that an option of the command line names; None for None.

    Raises ConfigError that names the option and what it may be.
    """
    if name is None:
        return None
    if name not in NUMBER_FORMATS:
        raise ConfigError(f"{option}={name} must be {', '.join(NUMBER_FORMATS)}")
    return NUMBER_FORMATS[name]
