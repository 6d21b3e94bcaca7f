"""The message-passing backbones by name: what each prepares of a batch's geometry, how it begins, and its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from phalanx.errors import ConfigError
from phalanx.families.materials.model.electronic_state import ElectronicState
from phalanx.families.materials.model.geometry import Geometry, find_triplets
from phalanx.families.materials.model.graph_embedding import GraphEmbedding
from phalanx.families.materials.model.layers import Atoms, ElementTable
from phalanx.families.materials.model.message_passing.dimenet import DimeNetBlock, DimeNetEmbedding
from phalanx.families.materials.model.message_passing.equivariant_backbones import EgnnBlock, PaiNNBlock
from phalanx.families.materials.model.message_passing.invariant_backbones import (
    CgcnnBlock,
    Gatv2Block,
    GinBlock,
    MfcBlock,
    SageBlock,
    SchNetBlock,
)
from phalanx.families.materials.model.message_passing.pna import PnaBlock, PnaEqBlock, PnaPlusBlock
from phalanx.families.materials.model_config import MaterialsModel

BuildBlock = Callable[[MaterialsModel, int], nn.Module]
"""From a model and the number of a block to a module (Atoms, Geometry) -> Atoms."""


class AtomEmbedding(nn.Module):
    """Scalars from a table of elements, or of graphs without atoms from features of their nodes; vectors, where a backbone
    has them, begin at 0."""

    def __init__(self, config: MaterialsModel, vectors: int) -> None:
        super().__init__()
        self.vectors = vectors
        self.graph: GraphEmbedding | None = None
        if config.graph is not None:
            self.graph = GraphEmbedding(config, config.graph)
            return
        self.elements = ElementTable(config.max_atomic_number, config.d_model)
        self.state = ElectronicState(config)

    def forward(self, geometry: Geometry) -> Atoms:
        """Return atoms before the first block."""
        if self.graph is not None:
            atoms: Atoms = self.graph(geometry)
        else:
            atoms = Atoms(self.state(self.elements(geometry.species_N, geometry.radial_ER.dtype), geometry))
        if not self.vectors:
            return atoms
        zeros_N3C = atoms.scalars_NC.new_zeros((atoms.scalars_NC.shape[0], 3, self.vectors))
        return atoms._replace(vectors_NMC=zeros_N3C)


class Backbone(NamedTuple):
    """How one backbone is built."""

    block: BuildBlock
    embedding: Callable[[MaterialsModel], nn.Module]
    """Gives a module Geometry -> Atoms."""
    vectors: Callable[[MaterialsModel], int] = lambda _: 0
    """Vector channels behind the last block."""
    prepare: Callable[[MaterialsModel, Geometry], Geometry] = lambda _, geometry: geometry
    """Adds what all blocks of this backbone need of the geometry."""


def backbone_of(config: MaterialsModel) -> Backbone:
    """Return the backbone that `config.body` names. Raises ConfigError where a package that it needs is missing."""
    return _spherical_backbone(config.body) if config.body in ("mace", "nequip") else _BACKBONES[config.body]


def _embed_scalars(config: MaterialsModel) -> nn.Module:
    return AtomEmbedding(config, 0)


def _spherical_backbone(body: str) -> Backbone:
    # Their constants come from e3nn, which is an optional extra.
    try:
        from phalanx.families.materials.model.message_passing.mace import (  # noqa: PLC0415
            MaceBlock,
            outgoing_degree,
            spherical_harmonics,
        )
        from phalanx.families.materials.model.message_passing.nequip import NequipBlock, nequip_outgoing_degree  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'model.body={body} needs the package {error.name}; pip install "phalanx-train[materials]"'
        ) from None
    outgoing = outgoing_degree if body == "mace" else nequip_outgoing_degree

    def vectors(config: MaterialsModel) -> int:
        return config.d_model if outgoing(config, config.n_layers - 1) else 0

    def prepare(config: MaterialsModel, geometry: Geometry) -> Geometry:
        degree = config.mace.degree if body == "mace" else config.nequip.degree
        return geometry._replace(harmonics_ES=spherical_harmonics(degree, geometry.unit_E3))

    return Backbone(MaceBlock if body == "mace" else NequipBlock, _embed_scalars, vectors, prepare)


_BACKBONES: dict[str, Backbone] = {
    "gin": Backbone(lambda config, _: GinBlock(config), _embed_scalars),
    "sage": Backbone(lambda config, _: SageBlock(config), _embed_scalars),
    "mfc": Backbone(lambda config, _: MfcBlock(config), _embed_scalars),
    "cgcnn": Backbone(lambda config, _: CgcnnBlock(config), _embed_scalars),
    "gatv2": Backbone(lambda config, _: Gatv2Block(config), _embed_scalars),
    "pna": Backbone(lambda config, _: PnaBlock(config), _embed_scalars),
    "pna+": Backbone(lambda config, _: PnaPlusBlock(config), _embed_scalars),
    "pnaeq": Backbone(
        lambda config, _: PnaEqBlock(config),
        lambda config: AtomEmbedding(config, config.d_model),
        lambda config: config.d_model,
    ),
    "schnet": Backbone(lambda config, _: SchNetBlock(config), _embed_scalars),
    "dimenet++": Backbone(
        lambda config, _: DimeNetBlock(config),
        DimeNetEmbedding,
        prepare=lambda _, geometry: geometry._replace(triplets=find_triplets(geometry)),
    ),
    "egnn": Backbone(EgnnBlock, lambda config: AtomEmbedding(config, 1), lambda _: 1),
    "painn": Backbone(
        lambda config, _: PaiNNBlock(config),
        lambda config: AtomEmbedding(config, config.d_model),
        lambda config: config.d_model,
    ),
}
