"""A trained network of the materials family, ready to predict, from wherever its checkpoint lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.checkpoint import Checkpoint
from phalanx.config.schema import Run
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.families.materials.config import MaterialsRun, learned_labels
from phalanx.families.materials.data.graph_shards import Split, open_prepared, spread_evenly
from phalanx.families.materials.data.trained_elements import trained_elements, untrained_by_source
from phalanx.families.materials.evaluation.prediction_errors import GraphErrors, GraphEvaluator
from phalanx.families.materials.inputs import columns_of
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import build_mesh
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ONE_RANK_FIELDS
from phalanx.nn.precision import PRECISIONS
from phalanx.training.checkpointing import find_trained_run, load_module, load_weights


@dataclass(frozen=True)
class LoadedNetwork:
    """A network on one device, in evaluation mode."""

    model: MaterialsNetwork
    run: MaterialsRun
    where: Path
    """The checkpoint."""
    step: int
    """Optimizer steps it was trained for."""

    def branch(self, name: str | None) -> int:
        """Return the number of the branch called `name`, or of the only one. Raises ConfigError where there is no such."""
        names = [branch.name for branch in self.run.model.branches]
        if name is None and len(names) == 1:
            return 0
        if name not in names:
            asked = "no branch is named" if name is None else f"there is no branch {name}"
            raise ConfigError(f"{self.where}: {asked}; choose one of {', '.join(names)}")
        return names.index(name)

    def untaught(self, branch: int) -> dict[str, list[str]]:
        """Return which of the heads `energy`, `charges` and `dipole` no label of the branch's source taught, each with the
        branches that were taught it. Empty where weights were trained before, which may have been by other labels."""
        run = self.run
        if run.training.init_from is not None or len(run.model.branches) == 1:
            return {}
        model = run.model
        from_charges = model.dipole is not None and model.dipole.from_charges
        taught: list[set[str]] = []
        for source in run.data.sources:
            used = {str(label) for label in source.labels.keys() & learned_labels(model).keys()}
            heads = used & {"charges", "dipole"}
            if used & {"energy", "forces", "stress"}:
                heads.add("energy")
            # A dipole that is summed from charges teaches these, and they teach it.
            if from_charges and heads & {"charges", "dipole"}:
                heads |= {"charges", "dipole"}
            taught.append(heads)
        names = [one.name for one in model.branches]
        found = {}
        for head in ("energy", "charges", "dipole"):
            giving = getattr(model, "charges" if head == "dipole" and from_charges else head)
            # A head that branches share is taught by all of them.
            if getattr(model, head) is not None and not giving.shared and head not in taught[branch]:
                found[head] = [name for name, heads in zip(names, taught, strict=True) if head in heads]
        return found


def load_network(path: Path, device: torch.device, dtype: torch.dtype | None = None) -> LoadedNetwork:
    """Load the newest whole checkpoint of a run directory, or one checkpoint, whatever layout wrote it.

    dtype: format of activations; by default that of the run, but float32 for a run in bfloat16, whose forces are too rough
    to move atoms by. Raises CheckpointError where there is no sound checkpoint of a materials model.
    """
    newest, run = _open_checkpoint(path)
    if dtype is None:
        dtype = PRECISIONS[run.layout.precision].main_dtype
    with torch.device("meta"):
        model = MaterialsNetwork(run.model, dtype=dtype).to(dtype)
    model.to_empty(device=device)
    load_module(newest.path, model, run.training.lora)
    return LoadedNetwork(model.eval().requires_grad_(False), run, newest.path, newest.step)


def split_errors(
    path: Path,
    split: Split,
    device: torch.device,
    *,
    samples: int | None = None,
    overrides: Sequence[str] = (),
    ranks: int = 1,
) -> tuple[Path, GraphErrors]:
    """Return the checkpoint that was found at `path`, and its errors on a split of the prepared data of its run.

    samples: structures to take, spread evenly over the split; None takes all. overrides: fields of its run file to change.
    ranks: ranks of the process group, which share the structures, each with the whole model; all call it and get all errors.

    Labels of what the model learned may be missing there: what there are labels of is scored.

    Raises CheckpointError as `load_network` does, DataError where data are not prepared or the split is empty, or without
    any such label.
    """
    newest, run = _open_checkpoint(path, overrides, trains=False)
    # Whatever layout trained it: errors are those of one rank.
    run = _with_layout(run, ONE_RANK_FIELDS)
    if ranks > 1:
        microbatch = resolve_layout(bind(run, LayoutModel), 1).microbatch
        run = _with_layout(run, {"dp_replicate": ranks, "microbatch": microbatch, "global_batch": ranks * microbatch})
    training, sources = open_prepared(run.data, "train"), open_prepared(run.data, split)
    if not any(len(source) for source in sources):
        raise DataError(
            f"the {split} split in {run.data.prepared} is empty; prepare with data.{split}_fraction above 0"
        )
    learned = list(learned_labels(run.model))
    model = bind(run, LayoutModel)
    layout = resolve_layout(model, ranks)
    applied = apply_layout(model, layout, build_mesh(layout, device), device, AttentionChoice("sdpa"), fill=False)
    load_weights(newest.path, applied)
    applied.refresh()
    evaluator = GraphEvaluator(run, sources, columns_of(run, training, all_needed=False), device, samples)
    trained, untrained = trained_elements(newest.path), None
    # Runs of older versions do not say what they were trained on.
    if trained is not None:
        found, names = spread_evenly(sources, samples), [branch.name for branch in run.model.branches]
        untrained = untrained_by_source(sources, found, names, [trained])
    errors, unlabelled = evaluator.errors(Executor(applied)), {}
    for source in run.data.sources:
        scored = {row.quantity for row in errors.rows if row.source == source.name}
        unlabelled[source.name] = [name for name in learned if name not in scored]
    if all(missing == learned for missing in unlabelled.values()):
        raise DataError(
            f"{run.data.prepared} has no label in the {split} split of what the model learned ({', '.join(learned)}), so "
            "there is nothing to compare with; name one under labels or properties of a source, and prepare it again"
        )
    return newest.path, replace(errors, untrained=untrained, unlabelled=unlabelled)


def _with_layout(run: MaterialsRun, fields: Mapping[str, int | str]) -> MaterialsRun:
    return run.model_copy(update={"layout": run.layout.model_copy(update=fields)})


def _open_checkpoint(
    path: Path, overrides: Sequence[str] = (), *, trains: bool = True
) -> tuple[Checkpoint, MaterialsRun]:
    newest, run = find_trained_run(path, overrides, trains=trains)
    return newest, require_materials(run, newest.path)


def require_materials(run: Run, checkpoint: Path) -> MaterialsRun:
    """Return the run of a checkpoint as one of this family. Raises CheckpointError for a model of another one."""
    if not isinstance(run, MaterialsRun):
        raise CheckpointError(f"{checkpoint} is of model.family={run.model.family}; a materials model is needed")
    return run
