"""The run file of the materials family: what its sections are, what its model asks of its data, and what training it does
not allow."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.families import Family
from phalanx.config.problems import Problem
from phalanx.config.schema import Run
from phalanx.families.materials.data_config import GraphData, GraphSource
from phalanx.families.materials.model_config import MaterialsModel


class MaterialsRun(Run):
    """A run that trains a model of molecules and materials."""

    model: MaterialsModel
    data: GraphData

    def find_problems(self) -> Iterator[Problem]:
        """See `Run`."""
        for rule in (_check_cutoff, _check_branches, _check_labels, _check_training):
            yield from rule(self)

    @property
    def data_names(self) -> list[str]:
        """See `Run`."""
        return [source.path for source in self.data.sources]


def learned(model: MaterialsModel) -> dict[str, str]:
    """Labels and properties that the model learns, by name, with the field of the run file that asks for each."""
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
    for head in ("properties", "atom_properties"):
        options = getattr(model, head)
        found |= dict.fromkeys(options.names if options else [], f"model.{head}")
    return found


def _check_cutoff(run: MaterialsRun) -> Iterator[Problem]:
    data, model = run.data.cutoff, run.model.cutoff
    if data != model:
        yield Problem(
            ("data", "cutoff"),
            f"data.cutoff={data:g} is not model.cutoff={model:g}: the model fades messages to 0 at its cutoff, and needs "
            f"every pair of atoms up to there",
            f"data.cutoff={model:g} model.cutoff={model:g}, or both {data:g}",
        )


def _check_branches(run: MaterialsRun) -> Iterator[Problem]:
    """One branch takes all sources; several are the sources by name and order."""
    branches, sources = ([one.name for one in part] for part in (run.model.branches, run.data.sources))
    if len(branches) > 1 and branches != sources:
        yield Problem(
            ("model", "branches"),
            f"model.branches are {', '.join(branches)}, data.sources are {', '.join(sources)}; several branches are one for "
            f"each source, by name and in order",
            "one branch named as each source, or a single branch for all",
        )


def _check_labels(run: MaterialsRun) -> Iterator[Problem]:
    wanted = learned(run.model)
    for name, field in wanted.items():
        if not any(name in _labels_of(source, field) for source in run.data.sources):
            yield Problem(
                ("data", "sources"),
                f"{field} learns {name}, which no source in data.sources has",
                f"{name} under {'labels' if _is_label(field) else field.removeprefix('model.')} of a source, or no {field}",
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
    if run.training.attention != "auto":
        yield Problem(
            ("training", "attention"),
            f"training.attention={run.training.attention} chooses among kernels without second derivatives; attention among "
            f"atoms uses none of them",
            "training.attention=auto",
        )


def one_program_obstacle(run: MaterialsRun) -> str | None:
    """The field because of which forward pass, forces and backward pass cannot be one program of fixed shapes, if any."""
    if run.model.body == "dimenet++":
        # It pairs edges that meet: how many, only the data tell.
        return "model.body=dimenet++"
    if run.model.attention is not None:
        return "model.attention"
    if run.layout.recompute != "none":
        return f"layout.recompute={run.layout.recompute}"
    return None if run.layout.cp in (1, "auto") else f"layout.cp={run.layout.cp}"


def _labels_of(source: GraphSource, field: str) -> set[str]:
    if _is_label(field):
        return set(source.labels)
    return set(getattr(source, field.removeprefix("model.")))


def _is_label(field: str) -> bool:
    return field not in ("model.properties", "model.atom_properties")


FAMILY = Family(
    name="materials",
    run=MaterialsRun,
    bound="phalanx.families.materials.bound:BoundMaterials",
    sizes="phalanx.families.materials.sizes",
)
"""The materials family as run files know it."""
