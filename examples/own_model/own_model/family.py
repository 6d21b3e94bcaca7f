"""What the family is called and what its run files hold. Imports no torch."""

from typing import Literal

from phalanx import BlockModel, BlockRun, Family
from phalanx.config.section import Width


class GatedConvModel(BlockModel):
    family: Literal["gated_conv"] = "gated_conv"
    """Model family."""
    hidden: Width
    """Channels of the convolution."""
    kernel: Width = 4
    """Positions that the convolution sees: this one and those before it."""


class GatedConvRun(BlockRun):
    model: GatedConvModel


FAMILY = Family("gated_conv", GatedConvRun, bound="own_model.model:BoundGatedConv")
