"""A network of an embedding, equal blocks and a head, of which any run of blocks can be built alone."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from phalanx.config.model import BlockModel
from phalanx.data.sources import TensorSpec, valid_targets
from phalanx.nn.layers import NumberedBlocks
from phalanx.nn.parameters import InitRule, InitRules, ParameterKind
from phalanx.nn.splits import ModelChunk, Splits


class BlockNetwork(nn.Module):
    """The whole of a network or one part of it, as `config` describes it. A subclass says what its modules are.

    Parameters are created uninitialised: `initial_rules` says what they start as. Use `phalanx.nn.layers` for what tensor
    parallelism is to split; anything else works too, computed alike on every rank of `tp`.
    """

    part: ModelChunk
    """What of the network this is."""

    def __init__(
        self, config: BlockModel, *, dtype: torch.dtype = torch.float32, part: ModelChunk | None = None
    ) -> None:
        """Build the chunk `part`. dtype: of the activations between blocks. part: None builds all of it."""
        super().__init__()
        self.part = part = part or ModelChunk(range(config.n_layers))
        self.config = config
        self.dtype = dtype
        if part.first:
            self.embedding = self.make_embedding(config)
        self.blocks = NumberedBlocks(lambda number: self.make_block(config, number), part.blocks)
        if part.last:
            self.head = self.make_head(config)

    @classmethod
    def make_embedding(cls, config: BlockModel) -> nn.Module:
        """Return what is called with inputs [B, S', *shape] and their positions int64 [S'], and gives [B, S', d_model].

        S' are the positions that this rank computes: all of them, or its part over `tp`.
        """
        raise NotImplementedError(f"{cls.__name__}.make_embedding")

    @classmethod
    def make_block(cls, config: BlockModel, number: int) -> nn.Module:
        """Return block `number`, [B, S', d_model] -> same shape. What mixes positions must stand between a column and a row
        matrix (see `splits`), where a rank has all positions of some features."""
        raise NotImplementedError(f"{cls.__name__}.make_block")

    @classmethod
    def make_head(cls, config: BlockModel) -> nn.Module:
        """Return what gives predictions [B, S', ...] from [B, S', d_model]."""
        raise NotImplementedError(f"{cls.__name__}.make_head")

    @classmethod
    def specs(cls, config: BlockModel) -> tuple[TensorSpec, TensorSpec]:
        """Return what one position of the inputs and of the targets holds."""
        raise NotImplementedError(f"{cls.__name__}.specs")

    @classmethod
    def splits(cls, config: BlockModel) -> Splits:
        """Return how modules may be split over `tp` (see `nn.splits`); by default nothing is."""
        return []

    @classmethod
    def initial_rules(cls, config: BlockModel) -> InitRules:
        """Return initial values by parameter name, first match wins.

        By default norms start at 1, biases at 0 and all else normal with 0.02; matrices that write to the residual stream
        with 1/sqrt(2 n_layers) of that, so that its variance does not grow with depth.
        """
        residual = 0.02 / math.sqrt(2 * config.n_layers)
        rows = [
            (f"{name}.weight", InitRule.normal(residual)) for name, split in cls.splits(config) if split.kind == "row"
        ]
        return [
            ("*norm.weight", InitRule.constant(1.0)),
            ("*.bias", InitRule.constant(0.0)),
            *rows,
            ("*", InitRule.normal(0.02)),
        ]

    @classmethod
    def parameter_kind(cls, name: str) -> ParameterKind:
        """Return the kind of the parameter `name`, which weight decay asks for."""
        kinds: tuple[tuple[str, ParameterKind], ...] = (
            ("*norm.weight", "norm"),
            ("*.bias", "bias"),
            ("embedding.*", "embedding"),
        )
        return next((kind for pattern, kind in kinds if fnmatchcase(name, pattern)), "matrix")

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        """Return the loss summed over the targets that count, a scalar in at least float32; by default squared errors."""
        wide = torch.promote_types(predicted.dtype, torch.float32)
        valid = valid_targets(targets)
        errors = predicted.to(wide) - torch.where(valid, targets, 0).to(wide)
        return torch.where(valid, errors.square(), 0.0).sum()
