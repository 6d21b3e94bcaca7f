"""The `model` section of a run file for the materials family: one message-passing body with several heads.

Pure description: it holds what defines the function the model computes and nothing about devices or layouts. Lengths are
in angstrom, energies in eV.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from phalanx.config.model import Model
from phalanx.config.section import Layers, Section, Width, Words, first_repeated

BackboneName = Literal[
    "gin",
    "sage",
    "mfc",
    "pna",
    "pna+",
    "pnaeq",
    "gatv2",
    "cgcnn",
    "schnet",
    "dimenet++",
    "egnn",
    "painn",
    "nequip",
    "mace",
]
Loss = Literal["mse", "mae", "huber"]
ElectronicQuantity = Literal["charge", "spin"]
Positive = Annotated[float, Field(gt=0.0)]
Weight = Annotated[float, Field(ge=0.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"), Words("a name of letters, digits, _ and -")]

MAX_ATOMIC_NUMBER = 118


class GatOptions(Section):
    """Holds the options that only the body gatv2 has."""

    heads: Width = 4
    """Attention heads over neighbours; must divide d_model."""


class MfcOptions(Section):
    """Holds the options that only the body mfc has."""

    degrees: Annotated[int, Field(ge=1, le=64)] = 5
    """Matrices, each for atoms with about as many neighbours: from none to twice the mean number and more."""


class DimeNetOptions(Section):
    """Holds the options that only the body dimenet++ has."""

    angular: Annotated[int, Field(ge=1, le=16)] = 7
    """Legendre polynomials that describe the angle between two bonds."""
    triplet_width: Width = 64
    """Width of the messages that triplets of atoms see."""
    basis_width: Width = 8
    """Width in between the geometric basis and the messages."""


class NequipOptions(Section):
    """Holds the options that only the body nequip has."""

    degree: Annotated[int, Field(ge=1, le=3)] = 2
    """Largest degree of the spherical harmonics of bonds and of what atoms keep: 1 vectors, 2 tensors too."""
    radial_width: Width = 64
    """Hidden width of the network that gives the radial weights."""


class MaceOptions(Section):
    """Holds the options that only the body mace has."""

    degree: Annotated[int, Field(ge=1, le=4)] = 3
    """Largest degree of the spherical harmonics of bonds."""
    hidden_degree: Annotated[int, Field(ge=0, le=2)] = 1
    """Largest degree of what atoms keep from layer to layer: 0 scalars, 1 vectors too, 2 tensors too."""
    correlation: Annotated[int, Field(ge=1, le=3)] = 3
    """Neighbours that enter one feature together; body order less one."""
    radial_width: Width = 64
    """Hidden width of the network that gives the radial weights."""
    radial_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """Hidden layers of that network; 3 in mace-torch."""
    fades: Literal["weights", "functions"] = "weights"
    """What fades towards the cutoff: the radial weights, or as in mace-torch the functions of distance that a network
    without biases makes them of."""
    element_mixing: Literal["channels", "matrices"] = "channels"
    """How elements weigh the skip connection: channel by channel, or as in mace-torch each by matrices of its own."""
    first_skip: bool = True
    """Whether the first block has a skip connection; without one its messages pass through matrices of the element."""
    kernels: Literal["auto", "own", "cuequivariance"] = "auto"
    """What computes messages and symmetric contractions: own operations, or cuEquivariance where it is installed and has
    kernels for device, format and width; the same up to rounding. auto takes them for captured steps of fp32 trainings that
    have 10,000 and more, which make up for a slower start, and own operations for all else."""
    density: bool = False
    """Whether sums of messages are divided by a learned density of neighbours, plus 1, in place of mean_neighbors."""


class GlobalAttention(Section):
    """Attention among all atoms of a structure, beside message passing (GPS), on invariant channels alone."""

    kind: Literal["softmax", "linear"] = "softmax"
    """Softmax costs atoms squared; linear (elu + 1 feature map) costs atoms."""
    heads: Width = 4
    """Attention heads; must divide d_model."""


class EnergyHead(Section):
    """Energy of a structure as a sum over its atoms, with forces and stress as its derivatives."""

    layers: Annotated[int, Field(ge=1, le=8)] = 2
    """Linear layers of the head."""
    width: Width | None = None
    """Width in between these layers; null takes half of d_model."""
    every_block: bool = False
    """Whether a linear layer reads a part of the energy off each block before the last, too, as in mace-torch."""
    shared: bool = False
    """Whether all branches share one head."""
    loss: Loss = "mse"
    """Error that is summed: squared, absolute, or Huber's with its bend at 1."""
    per_atom: bool = True
    """Whether the energy's error is divided by the number of atoms first."""
    weight: Weight = 1.0
    """Weight of the energy (eV, or eV/atom)."""
    force_weight: Weight | None = None
    """Weight of a force component (eV/angstrom); null computes no forces in training."""
    stress_weight: Weight | None = None
    """Weight of a stress component (eV/angstrom^3); null computes no stress in training."""
    stress_as: Literal["stress", "virial"] = "stress"
    """Whether the error of a stress is taken as it is, or as that of the virial by atom (eV/atom): times the volume over the
    number of atoms, as in mace-torch's loss of energies, forces and virials."""
    repulsion: Literal["zbl", "mace"] | None = None
    """Repulsion of nuclei nearer than their covalent radii, added to what is learned. zbl: the universal potential of
    Ziegler, Biersack and Littmark; mace: mace-torch's form of it, in units of energy_scale; null has none."""

    @model_validator(mode="after")
    def _stress_is_learned(self) -> EnergyHead:
        if self.stress_as == "virial" and self.stress_weight is None:
            raise ValueError(
                "stress_as=virial says how a stress is learned, and none is; set stress_weight, or leave it out"
            )
        return self


class Electrostatics(Section):
    """Energy of charges at any distance, beyond the cutoff too: Ewald's sum in crystals, all pairs in molecules."""

    from_charges: bool = False
    """Whether the charges of the charge head are used; else there are charges of its own, which energies and forces teach.
    Either way they are shifted to add up to the total charge."""
    smearing: Annotated[float, Field(ge=0.0)] = 1.0
    """Width of the Gaussians that charges are (angstrom); 0 for points, whose sum takes more waves."""
    layers: Annotated[int, Field(ge=1, le=8)] = 2
    """Linear layers of the head that gives its own charges."""
    shared: bool = False
    """Whether all branches share that head."""


class ChargeHead(Section):
    """Charges of atoms."""

    layers: Annotated[int, Field(ge=1, le=8)] = 2
    """Linear layers of the head."""
    shared: bool = False
    """Whether all branches share one head."""
    loss: Loss = "mse"
    """Error that is summed."""
    conserve: bool = True
    """Whether charges are shifted, equally in a structure, so that they add up to its total charge."""
    weight: Weight = 1.0
    """Weight of an atom's charge (elementary charges)."""


class DipoleHead(Section):
    """Dipole of a structure (of finite extent) about the mean position of its atoms."""

    layers: Annotated[int, Field(ge=1, le=8)] = 2
    """Linear layers of the head."""
    shared: bool = False
    """Whether all branches share one head."""
    loss: Loss = "mse"
    """Error that is summed."""
    from_charges: bool = False
    """Whether the charges of the charge head are used; else the dipole has charges of its own."""
    weight: Weight = 1.0
    """Weight of a component (elementary charge times angstrom)."""


class ClassOptions(Section):
    """How a property that is one of several classes is learned: by cross-entropy."""

    count: Annotated[int, Field(ge=2, le=1000)]
    """Number of classes."""
    weights: list[Positive] = Field(default=[])
    """Weight of each class in the loss; empty for 1 each."""

    @model_validator(mode="after")
    def _counts(self) -> ClassOptions:
        if self.weights and len(self.weights) != self.count:
            raise ValueError(f"weights has {len(self.weights)} values for count={self.count} classes")
        return self


_Classes = Annotated[
    ClassOptions,
    BeforeValidator(lambda value: {"count": value} if isinstance(value, int) else value),
    Words("a number of classes or a mapping with count and weights"),
]


class PropertyHead(Section):
    """Properties of structures, of atoms or of edges, each a number or a class."""

    names: Annotated[list[Name], Field(min_length=1), Words("a list of at least one name")]
    """The properties, in the order of the columns of the labels."""
    classes: dict[Name, _Classes] = Field(default={})
    """Those of them that are classes, each with how many; all others are numbers."""
    pooling: Literal["mean", "sum"] = "mean"
    """How atoms make a structure's property: mean for intensive ones, sum for extensive ones."""
    layers: Annotated[int, Field(ge=1, le=8)] = 2
    """Linear layers of the head."""
    shared: bool = False
    """Whether all branches share one head."""
    loss: Loss = "mse"
    """Error that is summed, in units of the branch's scale."""
    weight: Weight = 1.0
    """Weight of a property."""

    @model_validator(mode="after")
    def _classes_have_names(self) -> PropertyHead:
        unknown = next((name for name in self.classes if name not in self.names), None)
        if unknown is not None:
            raise ValueError(f"classes: {unknown} is not among names={self.names}")
        return self

    @property
    def columns(self) -> list[slice]:
        """Return the numbers of the head's result that belong to each property: one, or a score for each class."""
        widths = [self.classes[name].count if name in self.classes else 1 for name in self.names]
        return [slice(sum(widths[:place]), sum(widths[: place + 1])) for place in range(len(widths))]

    @property
    def outputs(self) -> int:
        """Return how many numbers the head gives."""
        count: int = self.columns[-1].stop
        return count


class NodePooling(Section):
    """Fewer nodes from block to block: TopKPooling (Gao & Ji 2019, graph U-Nets; Cangea et al. 2018), as in PyTorch
    Geometric. A learned direction scores nodes; the best of each graph stay, times their score, with edges between them."""

    ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of a graph's nodes that stay, rounded up."""
    every: Layers = 1
    """Blocks from one pooling to the next; none follows the last block."""


PROPERTY_HEADS = ("properties", "atom_properties", "edge_properties")
"""Heads of properties: of structures, of atoms and of edges. Sources have sections of these names."""
PROPERTY_LABELS = dict(zip(PROPERTY_HEADS, ("properties_GP", "atom_properties_NP", "edge_properties_EP"), strict=True))
"""Field of a batch that holds the labels of each of them."""
POSITION_BODIES = ("egnn", "painn", "pnaeq")
"""Backbones that need directions of edges."""
ELEMENT_BODIES = ("dimenet++", "nequip", "mace")
"""Backbones whose layers know elements, or angles between edges within a cutoff."""


class GraphInputs(Section):
    """What a model sees of graphs whose nodes are no atoms: numbers of nodes, edges and graphs, in the order of the arrays
    that sources name, each less its shift and over its scale."""

    nodes: Width
    """Numbers of a node."""
    edges: Annotated[int, Field(ge=0, le=4096)] = 0
    """Numbers of an edge."""
    graphs: Annotated[int, Field(ge=0, le=4096)] = 0
    """Numbers of a graph."""
    positions: bool = False
    """Whether lengths of edges are seen, and by backbones with vectors their directions."""
    nodes_shift: list[float] = Field(default=[])
    """What is taken off each number of a node; left out, its mean in the training data."""
    nodes_scale: list[Positive] = Field(default=[])
    """What it is divided by; left out, its spread in the training data."""
    edges_shift: list[float] = Field(default=[])
    """The same of edges."""
    edges_scale: list[Positive] = Field(default=[])
    """The same of edges."""
    graphs_shift: list[float] = Field(default=[])
    """The same of graphs."""
    graphs_scale: list[Positive] = Field(default=[])
    """The same of graphs."""

    @model_validator(mode="after")
    def _units_fit(self) -> GraphInputs:
        for level in GRAPH_LEVELS:
            for unit in ("shift", "scale"):
                given, wanted = len(getattr(self, f"{level}_{unit}")), getattr(self, level)
                if given not in (0, wanted):
                    raise ValueError(f"{level}_{unit} has {given} values, but there are {level}={wanted} numbers")
        return self


GRAPH_LEVELS = ("nodes", "edges", "graphs")
"""What features of a graph belong to; a field of `GraphInputs` each."""


class Branch(Section):
    """What belongs to one data set: a copy of every head that is not shared, and the units of its labels."""

    name: Name = "main"
    """Name of the data set."""
    weight: Weight = 1.0
    """Factor on the losses of its samples."""
    reference_energies: Annotated[
        dict[str, float], Words("a mapping of atomic numbers to energies in eV, as in {1: -13.6, 8: -2041.8}")
    ] = Field(default={})
    """Energy of each element (eV an atom), by atomic number; added to what the head gives. Elements not named have 0. Left
    out as a whole, training fits them to its data."""
    energy_scale: Positive = 1.0
    """What one unit of the energy head means (eV); left out, training takes the spread of forces, or of energies an atom."""
    properties_shift: list[float] = Field(default=[])
    """What a graph property of 0 means, one a property; left out, its mean in the training data."""
    properties_scale: list[Positive] = Field(default=[])
    """What one unit of a graph property means; left out, its spread in the training data."""
    atom_properties_shift: list[float] = Field(default=[])
    """What an atom property of 0 means; left out, its mean in the training data."""
    atom_properties_scale: list[Positive] = Field(default=[])
    """What one unit of an atom property means; left out, its spread in the training data."""
    edge_properties_shift: list[float] = Field(default=[])
    """What an edge property of 0 means; left out, its mean in the training data."""
    edge_properties_scale: list[Positive] = Field(default=[])
    """What one unit of an edge property means; left out, its spread in the training data."""

    @model_validator(mode="after")
    def _elements(self) -> Branch:
        for text in self.reference_energies:
            if not (text.isdecimal() and 1 <= int(text) <= MAX_ATOMIC_NUMBER):
                raise ValueError(f"reference_energies: {text} is not an atomic number from 1 to {MAX_ATOMIC_NUMBER}")
        return self


class MaterialsModel(Model):
    """One message-passing network with heads. Presets (`model.preset`) fill every field; single fields may be changed."""

    family: Literal["materials"] = "materials"
    """Model family."""
    n_layers: Layers
    """Message-passing blocks."""
    d_model: Width
    """Channels of an atom."""
    body: BackboneName = "painn"
    """How atoms exchange messages."""
    graph: GraphInputs | None = None
    """What the model sees of graphs whose nodes are no atoms and whose edges are given; null for atoms."""
    max_atomic_number: Annotated[int, Field(ge=1, le=MAX_ATOMIC_NUMBER)] = 100
    """Heaviest element; rows of the element tables."""
    cutoff: Positive = 5.0
    """Distance in angstrom beyond which atoms are no neighbours."""
    radial: Literal["bessel", "gaussian"] = "bessel"
    """Functions that describe a distance."""
    n_radial: Width = 20
    """Number of these functions."""
    envelope: Literal["polynomial", "cosine"] = "polynomial"
    """How messages fade towards the cutoff: polynomial (two continuous derivatives) or cosine (one)."""
    envelope_power: Annotated[int, Field(ge=3, le=16)] = 6
    """Lowest power of the polynomial: the higher, the later messages begin to fade."""
    distance_transform: Literal["agnesi"] | None = None
    """Distance that the radial functions are of: agnesi maps it to 1 for near atoms and less for far ones, by the covalent
    radii of both; null leaves it as it is."""
    mean_neighbors: Positive = 1.0
    """Sums over neighbours are divided by this; left out, training takes the mean number of neighbours of its data."""
    gatv2: GatOptions = GatOptions()
    """Options of the body gatv2."""
    mfc: MfcOptions = MfcOptions()
    """Options of the body mfc."""
    dimenet: DimeNetOptions = DimeNetOptions()
    """Options of the body dimenet++."""
    nequip: NequipOptions = NequipOptions()
    """Options of the body nequip."""
    mace: MaceOptions = MaceOptions()
    """Options of the body mace."""
    electronic_state: list[ElectronicQuantity] = Field(default=[])
    """What all predictions depend on besides the atoms: charge (total, e), spin (unpaired electrons: multiplicity - 1)."""
    pooling: NodePooling | None = None
    """Which nodes of a model with graph stay from block to block; null for all."""
    attention: GlobalAttention | None = None
    """Attention among all atoms of a structure; null for none."""
    energy: EnergyHead | None = None
    """Energies, forces and stresses; null for none."""
    electrostatics: Electrostatics | None = None
    """Energy of charges at any distance, added to that of the energy head; null for none."""
    charges: ChargeHead | None = None
    """Charges of atoms; null for none."""
    dipole: DipoleHead | None = None
    """Dipoles of structures; null for none."""
    properties: PropertyHead | None = None
    """Further properties of structures; null for none."""
    atom_properties: PropertyHead | None = None
    """Further properties of atoms (or nodes); null for none."""
    edge_properties: PropertyHead | None = None
    """Properties of edges, of a model with graph; null for none."""
    branches: Annotated[list[Branch], Field(min_length=1)] = Field(default=[Branch()])
    """The data sets, in the order of `data.sources`."""

    @model_validator(mode="after")
    def _fits(self) -> MaterialsModel:
        twice = first_repeated(self.electronic_state)
        if twice is not None:
            raise ValueError(f"electronic_state: {twice} is given twice; name each once")
        heads = (self.energy, self.charges, self.dipole, *(getattr(self, name) for name in PROPERTY_HEADS))
        if not any(heads):
            raise ValueError(
                f"the model predicts nothing; give energy, charges, dipole, {', '.join(PROPERTY_HEADS[:-1])} or "
                f"{PROPERTY_HEADS[-1]}"
            )
        attention = {"attention.heads": self.attention.heads if self.attention else 1}
        attention["gatv2.heads"] = self.gatv2.heads if self.body == "gatv2" else 1
        for name, count in attention.items():
            if self.d_model % count:
                raise ValueError(f"{name}={count} does not divide d_model={self.d_model}")
        if self.dipole is not None and self.dipole.from_charges and self.charges is None:
            raise ValueError("dipole.from_charges needs the charge head; give charges or set it to false")
        if self.electrostatics is not None and self.energy is None:
            raise ValueError("electrostatics is part of the energy; give energy or leave it out")
        if self.electrostatics is not None and self.electrostatics.from_charges and self.charges is None:
            raise ValueError("electrostatics.from_charges needs the charge head; give charges or set it to false")
        return self

    def pools_behind(self, number: int) -> bool:
        """Return whether nodes are left out behind block `number`, from 0."""
        # None follows the last block.
        return self.pooling is not None and number < self.n_layers - 1 and (number + 1) % self.pooling.every == 0

    @model_validator(mode="after")
    def _graph_fits(self) -> MaterialsModel:
        if self.graph is None:
            for name in ("edge_properties", "pooling"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} need a model with graph, whose edges are given; leave {name} out")
            return self
        if self.pooling is not None and (self.atom_properties or self.edge_properties):
            raise ValueError("pooling leaves out nodes, which atom_properties and edge_properties are of; drop one")
        for name in ("energy", "electrostatics", "charges", "dipole", "electronic_state", "distance_transform"):
            if getattr(self, name):
                raise ValueError(f"{name} is of atoms, and the nodes of a model with graph are none; leave it out")
        if self.body in ELEMENT_BODIES:
            raise ValueError(
                f"body={self.body} sees elements or angles within a cutoff; with graph set body=pna or another"
            )
        if self.body in POSITION_BODIES and not self.graph.positions:
            raise ValueError(
                f"body={self.body} needs directions of edges; set graph.positions=true, or body=pna or another"
            )
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> MaterialsModel:
        if self.envelope != "polynomial" and self.envelope_power != 6:
            raise ValueError(
                f"envelope_power={self.envelope_power} has no effect with envelope={self.envelope}; leave it out or set "
                "envelope=polynomial"
            )
        if self.energy is not None and self.energy.layers == 1 and self.energy.width is not None:
            raise ValueError(
                f"energy.width={self.energy.width} has no effect with energy.layers=1; leave it out or set energy.layers=2"
            )
        for name, body in (
            ("gatv2", "gatv2"),
            ("mfc", "mfc"),
            ("dimenet", "dimenet++"),
            ("nequip", "nequip"),
            ("mace", "mace"),
        ):
            options = getattr(self, name)
            if self.body != body and options != type(options)():
                raise ValueError(f"{name} has no effect with body={self.body}; leave it out or set body={body}")
        if self.body == "mace" and self.mace.hidden_degree > self.mace.degree:
            raise ValueError(
                f"mace.hidden_degree={self.mace.hidden_degree} must be at most mace.degree={self.mace.degree}"
            )
        if not self.mace.first_skip and self.mace.element_mixing != "matrices":
            raise ValueError(
                "mace.first_skip=false puts matrices of the element in place of the skip connection; set "
                "mace.element_mixing=matrices or mace.first_skip=true"
            )
        return self

    @model_validator(mode="after")
    def _branches_fit(self) -> MaterialsModel:
        names = [branch.name for branch in self.branches]
        twice = first_repeated(names)
        if twice is not None:
            raise ValueError(f"branches: the name {twice} is given twice; names must differ")
        for branch in self.branches:
            for field in PROPERTY_HEADS:
                head = getattr(self, field)
                for unit in ("shift", "scale"):
                    given, wanted = len(getattr(branch, f"{field}_{unit}")), len(head.names) if head else 0
                    if given not in (0, wanted):
                        raise ValueError(
                            f"branches: {branch.name}.{field}_{unit} has {given} values, but {field} has {wanted} names"
                        )
        return self
