"""The run file of the materials family: its `data` section, what its model asks of its data, and what training it refuses.

Pure description: units are checked where structures are read (`data.labels`), since their table lives there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from phalanx.config.families import Family
from phalanx.config.problems import Problem
from phalanx.config.schema import Run
from phalanx.config.section import NonNegativeInt, PathText, PositiveInt, Section, Words, first_repeated
from phalanx.families.materials.model_config import PROPERTY_HEADS, MaterialsModel
from phalanx.families.materials.sizes import EWALD_TAIL, edges_sum_charges

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Functional = Literal["pbe", "pbesol", "rpbe", "revpbe", "pbe0", "blyp", "b3lyp", "tpss"]
LabelName = Literal["energy", "forces", "stress", "charges", "dipole", "total_charge", "multiplicity"]


_COMPONENTS = {"xx", "yy", "zz", "yz", "xz", "xy"}


class GraphLabel(Section):
    """Where a label stands in the files of a source, and in which unit."""

    unit: str = ""
    """Unit in the files, such as eV, Ha, kcal/mol, Ha/bohr, GPa, D, or 1 for a pure number; empty for classes."""
    classes: list[str] = Field(default=[])
    """Names of the classes, of a property that is none of numbers. The files hold these names, or 0, 1, ... in this order;
    -1 or NaN where the class is not known."""
    key: str | None = None
    """Name in the files (array, column or property); null means the label's own name."""
    column: NonNegativeInt | None = None
    """Column, where `key` is a table with one row a structure; null takes the whole array."""
    factor: float = 1.0
    """A further factor, such as -1 for stresses or virials of the opposite sign (here positive stress is tension)."""
    given_as: Literal["stress", "virial"] = "stress"
    """Of the stress: what the files have. virial: minus the derivative of the energy by strain (eV), which is minus the
    stress times the volume, as in ASE, QUIP, mace-torch and DeePMD."""
    components: str | None = None
    """Of a stress of six numbers: their order, such as "xx yy zz xy yz xz" (VASP); null means "xx yy zz yz xz xy" (Voigt's,
    of ASE); a virial of six numbers must say it."""

    @model_validator(mode="after")
    def _says_what_it_is(self) -> GraphLabel:
        if bool(self.unit) == bool(self.classes):
            raise ValueError("give either unit, of numbers (1 for pure ones), or classes")
        if self.components is not None and {"".join(sorted(one)) for one in self.components.split()} != _COMPONENTS:
            raise ValueError(
                f'components="{self.components}": name the six numbers in their order, as in "xx yy zz yz xz xy"'
            )
        if self.classes and (len(self.classes) < 2 or len(set(self.classes)) < len(self.classes)):
            raise ValueError(f"classes={self.classes}: at least two are needed, each with its own name")
        return self


_Label = Annotated[
    GraphLabel,
    BeforeValidator(lambda value: {"unit": value} if isinstance(value, str) else value),
    Words("a unit or a mapping with unit, key, column and factor"),
]


class GivenGraphs(Section):
    """What stands in files of graphs whose nodes are no atoms: grains and their faces, meshes, networks. Each name is an
    array's, of one or several columns."""

    node_features: Annotated[list[str], Field(min_length=1)]
    """Arrays with a row a node, which the model sees."""
    edge_features: list[str] = Field(default=[])
    """Arrays with a row an edge, which the model sees."""
    graph_features: list[str] = Field(default=[])
    """Arrays with a row a graph, which the model sees."""
    positions: bool = False
    """Whether nodes have positions (array `pos`), in a unit of length of the source's own."""


class ArrayNames(Section):
    """Names of the arrays of atoms in HDF5 files, where they have others than the known ones; null takes those."""

    positions: str | None = None
    """Positions: coordinates, conformations, positions, pos or coord."""
    species: str | None = None
    """Atomic numbers or symbols of elements: atomic_numbers, species, numbers, nuclear_charges or z."""
    cell: str | None = None
    """Lattice vectors as rows: cell or cells."""
    pbc: str | None = None
    """Flags of the periodic directions: pbc. Without them, a structure is periodic if its cell is not all zeros."""


class SplitFiles(Section):
    """Files that list the structures of each split: whole numbers that count from 0 through the files of the source, as text
    or a JSON list. Structures that none of them lists are left out."""

    train: PathText
    """File that lists what is trained on."""
    validation: PathText | None = None
    """File that lists what is held out for validation; null holds nothing out."""
    test: PathText | None = None
    """File that lists what is held out for the test; null holds nothing out."""


class GraphSource(Section):
    """One body of structures with its own labels and units."""

    name: Name
    """Name of the source: of its folder of prepared shards, and of its branch in a model with branches."""
    path: PathText
    """A file, or a pattern such as `runs/*.extxyz`, of structures."""
    format: Literal["auto", "npz", "extxyz", "ase", "aselmdb", "qm9_csv", "adios", "hdf5"] = "auto"
    """Ragged arrays (.npz), extended XYZ, an ASE database (.db or .aselmdb), QM9's CSV, HydraGNN's ADIOS2 (.bp), or HDF5 as
    ANI-1x and SPICE come in (.h5 or .hdf5); auto goes by the ending."""
    arrays: ArrayNames | None = None
    """Of HDF5 files: names of positions, elements and cells, where they are none of the known ones."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the samples relative to other sources; null means its number of structures: each is read once an epoch."""
    graph: GivenGraphs | None = None
    """Of a source of graphs whose nodes are no atoms and whose edges the files give; a node then stands in the place of an
    atom. null for atoms, whose edges are found."""
    length_unit: str = "A"
    """Unit of positions and cells. An HDF5 file whose positions have no attribute `units` needs it written."""
    labels: dict[LabelName, _Label] = Field(default_factory=dict)
    """Labels to read: energy, forces, stress, charges (of atoms), dipole; and what a model is told: total_charge and
    multiplicity (2S + 1, unit 1). Without the former, charges say it by their sum, and a structure without charges is
    taken for neutral; one without a multiplicity for a singlet."""
    properties: dict[Name, _Label] = Field(default_factory=dict)
    """Further numbers, one a structure, by the name that a head asks for."""
    atom_properties: dict[Name, _Label] = Field(default_factory=dict)
    """Further numbers, one an atom (or node), by the name that a head asks for."""
    edge_properties: dict[Name, _Label] = Field(default_factory=dict)
    """Further numbers, one an edge, by the name that a head asks for; of sources with `graph`."""
    group_by: str | None = None
    """Name in the files of what belongs together: structures of one group fall into one split, over sources too. Of an HDF5
    file that has no array `group`, that is the name of the group that they stand in."""
    split: SplitFiles | None = None
    """Splits that are given, in place of those drawn by data.validation_fraction and data.test_fraction; null draws them."""
    missing_labels: Literal["refuse", "allow"] = "refuse"
    """Whether a structure may lack a label; it then does not count for that label's loss."""
    no_edges: Literal["refuse", "allow"] = "refuse"
    """Whether a structure without any pair of atoms inside the cutoff, such as a lone atom, is kept."""
    charge_sum: Literal["whole", "any"] = "whole"
    """Whether charges of a structure must add up, within 0.1 e, to its total_charge or without one to a whole number."""
    check_units: bool = True
    """Whether bond lengths and forces that hint at a wrong unit are refused."""
    dispersion: Functional | None = None
    """Functional whose D3 dispersion is taken off the energies, forces and stresses as they are prepared, so that the
    network learns the rest; calculators add it again. null for labels without dispersion, or to learn it."""

    @model_validator(mode="after")
    def _stress_is_one(self) -> GraphSource:
        for labels in (self.labels, self.properties, self.atom_properties, self.edge_properties):
            for name, label in labels.items():
                is_stress = labels is self.labels and name == "stress"
                if not is_stress and (label.given_as == "virial" or label.components is not None):
                    raise ValueError(f"{name}: given_as and components are of the stress; leave them out")
        return self

    @model_validator(mode="after")
    def _arrays_fit(self) -> GraphSource:
        if self.arrays is not None and self.format not in ("auto", "hdf5"):
            raise ValueError(f"arrays names those of HDF5 files, and format={self.format}; leave arrays out")
        return self

    @model_validator(mode="after")
    def _graph_fits(self) -> GraphSource:
        if self.graph is None:
            if self.edge_properties:
                raise ValueError(
                    "edge_properties need edges that files give, as a source with graph has; leave them out"
                )
            return self
        if self.format not in ("auto", "npz"):
            raise ValueError(f"format={self.format} holds atoms; a source with graph is read from .npz files")
        for field, given in (("labels", self.labels), ("dispersion", self.dispersion)):
            if given:
                raise ValueError(f"{field} are of atoms, and nodes of a source with graph are none; leave {field} out")
        return self


class GraphCost(Section):
    """What a structure costs to compute, in any unit: only ratios matter."""

    node: Annotated[float, Field(ge=0.0)] = 1.0
    """Cost of an atom."""
    edge: Annotated[float, Field(ge=0.0)] = 0.3
    """Cost of a directed pair of atoms: one filter of a radial basis against the several matrices of an atom."""
    graph: Annotated[float, Field(ge=0.0)] = 0.0
    """Cost of a structure whatever its size."""

    @model_validator(mode="after")
    def _positive(self) -> GraphCost:
        if self.node + self.edge == 0.0:
            raise ValueError("node=0 and edge=0 leave nothing to balance; give one of them a cost")
        return self


class GraphData(Section):
    """What a materials model is trained on."""

    sources: Annotated[list[GraphSource], Field(min_length=1)]
    """Where structures come from."""
    prepared: PathText
    """Folder of prepared shards, one folder a source inside."""
    cutoff: Annotated[float, Field(gt=0.0)] = 5.0
    """Reach of an edge in angstrom. Of graphs with positions whose edges are given: a length that none of them exceeds."""
    max_neighbours: PositiveInt | None = None
    """Nearest sources kept for each atom, with all that tie with the last of them; null keeps all."""
    validation_fraction: Share = 0.05
    """Share of structures held out for validation, by hash."""
    test_fraction: Share = 0.05
    """Share of structures held out for the test, by hash."""
    batch_by: Literal["cost", "graphs"] = "cost"
    """Whether global batches are cut at equal cost, global_batch structures on average, or at equal number of structures."""
    cost: GraphCost = GraphCost()
    """Cost of a structure, for cutting global batches and, until step times are measured, for sharing them out."""
    share_by: Literal["cost", "number"] = "cost"
    """Whether ranks get structures of equal cost or, for comparison, equal numbers of structures as they come."""
    fit_cost_every: PositiveInt | None = 50
    """Steps after which costs are fitted again to measured times, which ranks then share out structures by; null (as does
    training.deterministic) keeps `cost`. Which structures a step holds depends on `cost` alone."""
    microbatch_cost: Annotated[float, Field(gt=0.0)] | None = None
    """Most cost of a micro-batch on one device, in units of `cost`; null leaves how many there are to the layout."""
    oversized: Literal["refuse", "alone"] = "refuse"
    """Whether a structure that costs more than microbatch_cost is refused, or is a micro-batch of its own."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """Batches read ahead in the background; 0 reads in the training loop."""
    store: Literal["files", "memory"] = "files"
    """Where batches come from: prepared files, or the memory of the ranks, each of which then reads a part once and sends
    others what their batches need of it. Batches are the same."""
    store_ranks: PositiveInt | None = None
    """Ranks that hold one copy together in their memory (`store: memory`), such as those of a node; null takes all."""
    verify: bool = True
    """Whether checksums of all training data are compared in the background as training begins."""

    @model_validator(mode="after")
    def _fits(self) -> GraphData:
        names = [source.name for source in self.sources]
        twice = first_repeated(names)
        if twice is not None:
            raise ValueError(f"two sources are named {twice}; give each its own name")
        unweighted = [source.name for source in self.sources if source.weight is None]
        if 0 < len(unweighted) < len(self.sources):
            raise ValueError(f"source {unweighted[0]} has no weight and others have one; give all of them one, or none")
        if self.store_ranks is not None and self.store == "files":
            raise ValueError(
                f"store_ranks={self.store_ranks} ranks hold nothing with store=files; set store=memory, or store_ranks=null"
            )
        if self.validation_fraction + self.test_fraction >= 1.0:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} and test_fraction={self.test_fraction} leave nothing "
                f"to train on; lower one"
            )
        return self


class MaterialsRun(Run):
    """A run that trains a model of molecules and materials."""

    model: MaterialsModel
    data: GraphData

    def find_problems(self) -> Iterator[Problem]:
        """See `Run`."""
        data, model = self.data.cutoff, self.model.cutoff
        if self.layout.batch_warmup:
            yield Problem(
                ("layout", "batch_warmup"),
                "layout.batch_warmup changes the number of samples a step, and batches of structures are cut at equal cost",
                "layout.batch_warmup=[]",
            )
        if self.training.noise_scale_every is not None:
            yield Problem(
                ("training", "noise_scale_every"),
                f"training.noise_scale_every={self.training.noise_scale_every} halves batches, and those of structures are "
                "cut at equal cost",
                "training.noise_scale_every=null",
            )
        if data != model:
            yield Problem(
                ("data", "cutoff"),
                f"data.cutoff={data:g} is not model.cutoff={model:g}: the model fades messages to 0 at its cutoff, and "
                "needs every pair of atoms up to there",
                f"data.cutoff={model:g} model.cutoff={model:g}, or both {data:g}",
            )
        if self.data.max_neighbours is not None and edges_sum_charges(self.model):
            yield Problem(
                ("data", "max_neighbours"),
                f"data.max_neighbours={self.data.max_neighbours} leaves out edges, over which a part of the energy of "
                "charges is summed",
                f"model.electrostatics.smearing={model / (2.0 * EWALD_TAIL):g} or more, or data.max_neighbours=null",
            )
        branches, sources = ([one.name for one in part] for part in (self.model.branches, self.data.sources))
        # A single branch takes all sources, whatever their names.
        if len(branches) > 1 and branches != sources:
            yield Problem(
                ("model", "branches"),
                f"model.branches are {', '.join(branches)}, data.sources are {', '.join(sources)}; several branches are one "
                f"for each source, by name and in order",
                "one branch named as each source, or a single branch for all",
            )
        functionals = {str(source.dispersion) for source in self.data.sources}
        if len(branches) == 1 and len(functionals) > 1:
            yield Problem(
                ("data", "sources"),
                f"sources of one branch have data.sources.dispersion={', '.join(sorted(functionals))}: what the branch "
                "learns would lack one dispersion here and another there",
                "one functional for all sources, or a branch for each",
            )
        yield from _check_graphs(self)
        yield from _check_training(self)

    def find_training_problems(self) -> Iterator[Problem]:
        """Yield labels that the model learns and no source has, and sources with nothing to learn."""
        return _check_labels(self)

    @property
    def data_names(self) -> list[str]:
        """See `Run`."""
        return [source.path for source in self.data.sources]


def learned_labels(model: MaterialsModel) -> dict[str, str]:
    """Return labels and properties that the model learns, by name, with the field of the run file that asks for each."""
    found: dict[str, str] = {}
    if model.energy is not None:
        found["energy"] = "model.energy"
        if model.energy.force_weight is not None:
            found["forces"] = "model.energy.force_weight"
        if model.energy.stress_weight is not None:
            found["stress"] = "model.energy.stress_weight"
    for label in ("charges", "dipole"):
        if getattr(model, label) is not None:
            found[label] = f"model.{label}"
    for head in PROPERTY_HEADS:
        options = getattr(model, head)
        found |= dict.fromkeys(options.names if options else [], f"model.{head}")
    return found


def _check_graphs(run: MaterialsRun) -> Iterator[Problem]:
    """Yield what sources of graphs and the model's `graph` say differently, and classes likewise."""
    model = run.model
    for source in run.data.sources:
        if (source.graph is None) != (model.graph is None):
            here, there = ("has no", "has") if source.graph is None else ("has", "has no")
            yield Problem(
                ("model", "graph"),
                f"source {source.name} {here} graph, and the model {there} model.graph: it sees atoms by their element, or "
                "nodes and edges by their features",
                "graph in every source and in model, or in none",
            )
        elif (
            source.graph is not None
            and model.graph is not None
            and model.graph.positions
            and not source.graph.positions
        ):
            yield Problem(
                ("model", "graph", "positions"),
                f"model.graph.positions=true, and source {source.name} has none",
                f"graph.positions: true for source {source.name}, or model.graph.positions=false",
            )
        # A source lists its classes as its files say them; the model knows how many there are.
        for head in PROPERTY_HEADS:
            options = getattr(model, head)
            for name in options.names if options else []:
                label = getattr(source, head).get(name)
                counted = options.classes[name].count if name in options.classes else 0
                if label is not None and len(label.classes) != counted:
                    yield Problem(
                        ("model", head, "classes"),
                        f"{head}.{name} has {len(label.classes)} classes in source {source.name}, {counted} in the model",
                        f"{name}: {len(label.classes)} under model.{head}.classes"
                        if label.classes
                        else f"classes of {name} in source {source.name}, or no {name} under model.{head}.classes",
                    )


def _check_labels(run: MaterialsRun) -> Iterator[Problem]:
    wanted = learned_labels(run.model)
    for name, field in wanted.items():
        if not any(name in _labels_of(source, field) for source in run.data.sources):
            yield Problem(
                ("data", "sources"),
                f"{field} learns {name}, which no source in data.sources has",
                f"{name} under {'labels' if _is_label(field) else field.removeprefix('model.')} of a source, or no {field}",
            )
    # A charge may be told as such, or follow from those of atoms.
    told = {"charge": ("total_charge", "charges"), "spin": ("multiplicity",)}
    for quantity in run.model.electronic_state:
        if not any(source.labels.keys() & set(told[quantity]) for source in run.data.sources):
            yield Problem(
                ("model", "electronic_state"),
                f"model.electronic_state has {quantity}, and no source in data.sources has {' or '.join(told[quantity])}: "
                "it would not vary in training, so that its parameters would learn nothing",
                f"{told[quantity][0]} under labels of a source, or no {quantity} in model.electronic_state",
            )
    for source in run.data.sources:
        if not any(name in _labels_of(source, field) for name, field in wanted.items()):
            yield Problem(
                ("data", "sources"),
                f"source {source.name} has nothing that the model learns ({', '.join(wanted)}), so it would train nothing",
                "a label of it, a head for what it has, or no such source",
            )


def _check_training(run: MaterialsRun) -> Iterator[Problem]:
    if run.layout.recompute == "selective":
        yield Problem(
            ("layout", "recompute"),
            "layout.recompute=selective is for matmuls of blocks; in materials messages of edges take the memory, which "
            "full computes again",
            "layout.recompute=full",
        )
    # `auto` gives way where a step cannot be one program; true is refused.
    obstacle = one_program_obstacle(run)
    if run.training.compile is True and obstacle is not None:
        yield Problem(
            ("training", "compile"),
            f"training.compile=true makes one program of a whole step, which cannot be with {obstacle}",
            "training.compile=auto",
        )
    if run.layout.precision == "fp16":
        yield Problem(
            ("layout", "precision"),
            "layout.precision=fp16 scales the loss against underflow, but not the derivative inside it that forces are",
            "layout.precision=fp32",
        )
    if run.layout.in_8_bits:
        yield Problem(
            ("layout", "precision"),
            f"layout.precision={run.layout.precision} multiplies matrices in 8 bits, and layers of networks of atoms are "
            "differentiated twice and too narrow to gain by it",
            "layout.precision=bf16",
        )
    if run.training.attention != "auto":
        yield Problem(
            ("training", "attention"),
            f"training.attention={run.training.attention} chooses among kernels without second derivatives; attention among "
            f"atoms uses none of them",
            "training.attention=auto",
        )


def one_program_obstacle(run: MaterialsRun) -> str | None:
    """Return the field because of which forward pass, forces and backward pass cannot be one program of fixed shapes; None
    where they can."""
    if run.model.graph is not None:
        # Batches are padded with edges beyond the cutoff, and edges that are given do not fade.
        return "model.graph"
    if run.model.body == "dimenet++":
        # It pairs edges that meet: how many, only the data tell.
        return "model.body=dimenet++"
    if run.model.attention is not None:
        return "model.attention"
    if run.model.electrostatics is not None:
        # How many waves fit into a cell, only the data tell.
        return "model.electrostatics"
    if run.layout.recompute != "none":
        return f"layout.recompute={run.layout.recompute}"
    return None if run.layout.cp in (1, "auto") else f"layout.cp={run.layout.cp}"


def _labels_of(source: GraphSource, field: str) -> set[str]:
    if _is_label(field):
        return set(source.labels)
    return set(getattr(source, field.removeprefix("model.")))


def _is_label(field: str) -> bool:
    return field.removeprefix("model.") not in PROPERTY_HEADS


FAMILY = Family(
    name="materials",
    run=MaterialsRun,
    bound="phalanx.families.materials.bound:BoundMaterials",
    sizes="phalanx.families.materials.sizes",
    presets=Path(__file__).with_name("presets"),
    start=Path(__file__).with_name("start.yaml"),
)
"""The materials family as run files know it."""
