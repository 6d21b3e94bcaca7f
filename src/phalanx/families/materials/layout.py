"""The materials family under parallelism: whole networks, run on batches of structures or on shares of their atoms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx.data.batch_stream import Batch
from phalanx.families.materials.config import MaterialsRun, one_program_obstacle
from phalanx.families.materials.data.graph_batches import GraphBatch
from phalanx.families.materials.evaluation.prediction_errors import error_sums
from phalanx.families.materials.graph_parallel.cut_batches import Cutting, cut_batch, cutting_of
from phalanx.families.materials.graph_parallel.halo_exchange import HaloExchange
from phalanx.families.materials.model.geometry import NO_EXCHANGE
from phalanx.families.materials.model.losses import split_labels, summed_losses
from phalanx.families.materials.model.network import MaterialsNetwork
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.materials.step_capture import StepCapture
from phalanx.families.materials.step_kernels import steps_have_kernels
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.layout_model import BuildContext, LayoutModel, Stage, TrainingPass
from phalanx.layout.place import TensorSplits
from phalanx.nn.splits import ModelChunk

_EDGE_CHUNK = 2**16
"""Edges whose messages are held at once under recompute: about 0.5 GB of PaiNN's at 128 channels."""


class MaterialsStage(Stage):
    """Maps atomic numbers to the summed losses of all tasks."""

    loss_is_whole = True
    recomputes = True
    rows_are_positions = False
    keeps_branches = False
    """Whether only some data sets have their heads here."""

    def __init__(self, part: MaterialsNetwork, index: int, share: SequenceShare, seed: int, cutting: Cutting) -> None:
        """cutting: how ranks of `cp` divide the atoms of a micro-batch."""
        super().__init__(part, index, share, seed, 1)
        self.cutting = cutting
        self.one_unit = part.config.energy is not None
        """Forces may be asked for (`layout.data_parallel.fully_sharded` says what that means)."""
        self.capture: StepCapture | None = None
        """Runs training's micro-batches as one program each, where they are captured."""
        self._places: list[tuple[nn.Module, str]] | None = None

    def forward(
        self, x: Tensor, sample_indices_B: Tensor, *, training: TrainingPass | None = None, **inputs: Any
    ) -> Tensor:
        """See `Stage`.

        x: int64 atomic numbers [N]. inputs: those of `MaterialsNetwork.forward`, `halo` of a share that `cut` gave, and at
        will `measured_sources`, the number of data sets: errors by data set (`evaluation.prediction_errors`) then follow the
        losses, in one row of numbers.
        """
        halo = inputs.pop("halo", None)
        inputs["exchange"] = NO_EXCHANGE if halo is None else HaloExchange(halo, self.share.cp)
        source_G, sources = inputs["source_G"], inputs.pop("measured_sources", None)
        if len(self.part.config.branches) == 1:
            # A single head takes all data sets, whatever their numbers.
            inputs["source_G"] = torch.zeros_like(source_G)
        if sources is not None:
            config, units, graph_N, branch_G = self.part.config, self.part.units, inputs["graph_N"], inputs["source_G"]
            labels, seen = split_labels(inputs)
            forces, stress = labels.forces_N3 is not None, labels.stress_G33 is not None
            found = self.part.predict(x, **seen, forces=forces, stress=stress)
            # Over `cp` a rank holds some atoms of a structure; an error per atom needs the number of all.
            atoms_G = inputs["exchange"].atoms_by_graph(graph_N, len(source_G))
            atoms = {"graph_N": graph_N, "target_E": seen["edges_2E"][1], "atoms_G": atoms_G}
            cells_G33 = inputs["cells_G33"]
            losses = summed_losses(config, units, found, labels, branch_G=branch_G, cells_G33=cells_G33, **atoms)
            errors = error_sums(config, found, labels, source_G=source_G, sources=sources, **atoms)
            return torch.cat((losses, errors.flatten()))
        if self.capture is not None and training is not None and len(source_G):
            losses_of = self.capture.add_gradients if training.adds_gradients else self.capture.losses
            # The parameters as they are now: FSDP2 puts gathered ones in the places of shards. Places stay, and are kept.
            if self._places is None:
                modules = self.part.modules()
                own = [(p, (module, name)) for module in modules for name, p in module.named_parameters(recurse=False)]
                self._places = list(dict(own).values())
            parameters = [getattr(module, name) for module, name in self._places]
            return losses_of({"species_N": x, **inputs}, parameters, training.scale)
        trained: Tensor = self.part(x, **inputs)
        return trained

    def cut(self, batch: Batch, microbatches: int) -> Batch:
        """Return, over `cp`, this rank's atoms of every structure (`graph_parallel.cut_batches`), unless it was cut on
        reading."""
        if self.share.cp.size > 1 and isinstance(batch, GraphBatch):
            return cut_batch(batch, microbatches, self.cutting)
        return batch

    def branch_parameters(self) -> set[nn.Parameter]:
        """See `Stage`."""
        return set(self.part.head.branch_parameters()) if self.keeps_branches else set()


class MaterialsLayout(LayoutModel):
    """See `layout.layout_model.LayoutModel`."""

    run: MaterialsRun

    compiles_blocks = False
    """A compiled block has no second derivative; a step is captured or compiled as a whole (`step_capture`)."""

    def build(self, building: BuildContext, part: ModelChunk) -> tuple[MaterialsNetwork, TensorSplits]:
        """Return the whole network: nothing is split."""
        return self._build_network(building, part, self.run.model)

    def _build_network(
        self, building: BuildContext, part: ModelChunk, config: MaterialsModel
    ) -> tuple[MaterialsNetwork, TensorSplits]:
        chunk = None if self.run.layout.recompute == "none" else _EDGE_CHUNK
        with torch.device("meta"):
            model = MaterialsNetwork(config, dtype=self.precision.compute_dtype, edge_chunk=chunk, part=part)
        if building.branches is not None:
            model.head.keep(building.branches)
        return model, building.split_parameters(model, self.splits())

    def build_stage(self, building: BuildContext, part: ModelChunk, index: int) -> tuple[Stage, TensorSplits]:
        """Return what runs the network, captured where it can be."""
        network, splits = self.build(building, part)
        run = self.run
        cutting = cutting_of(run, building.share.cp)
        stage = MaterialsStage(network, index, building.share, run.training.seed, cutting)
        stage.keeps_branches = building.branches is not None
        if _captures_steps(run, building):
            # A program needs all parameters at once.
            stage.one_unit = True
            config = run.model
            if steps_have_kernels(run, building.device, self.precision.compute_dtype):
                config = config.model_copy(
                    update={"mace": config.mace.model_copy(update={"kernels": "cuequivariance"})}
                )

            def build_replica() -> nn.Module:
                """Return a second network of the same kind on the device, its parameters without values."""
                replica, _ = self._build_network(building, network.part, config)
                (dtype,) = {parameter.dtype for parameter in network.parameters()}
                # Frozen parameters are frozen in both.
                for mine, theirs in zip(replica.parameters(), network.parameters(), strict=True):
                    mine.requires_grad_(theirs.requires_grad)
                return replica.to(dtype).to_empty(device=building.device)

            stage.capture = StepCapture(
                build_replica,
                source=0 if building.branches is None else building.branches.start,
                cutoff=run.model.cutoff,
                compiled=run.training.compile is True,
            )
        return stage, splits


def _captures_steps(run: MaterialsRun, building: BuildContext) -> bool:
    """Return whether training runs as captured programs: as asked for, and by `auto` on accelerators wherever it can."""
    if building.share.cp.size > 1 or one_program_obstacle(run) is not None:
        return False
    if run.training.compile == "auto":
        # Of a model without forces, blocks are gathered one by one; a program needs all parameters at once.
        sharded = building.gathered and run.model.energy is None
        return building.device.type != "cpu" and not (sharded or run.training.deterministic)
    return run.training.compile
