"""A model of blocks bound to its run: everything that layouts, training, the planner and verification ask for follows from
its network and its data source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.config.check import batch_sizes
from phalanx.config.model import BlockModel
from phalanx.data.sources import (
    DataSource,
    SampleBatch,
    SampleStream,
    SourceReader,
    TensorSpec,
    open_source,
    valid_targets,
)
from phalanx.families.blocks.config import BlockRun
from phalanx.families.blocks.network import BlockNetwork
from phalanx.families.family import DeclaredModel
from phalanx.families.registry import bound_class
from phalanx.layout.context_parallel.split_context import SequenceShare
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import BuildContext, Stage, TrainingPass
from phalanx.layout.mesh import Mesh
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.streamed_weights.stream_pairs import Stream, stream_matrices
from phalanx.nn.layers import Linear
from phalanx.nn.parameters import InitRules, ParameterKind
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import ModelChunk, SplitCount, Splits
from phalanx.planner.trace.traced_model import MODEL_PARTS, Kernel, PartName, PartTracer, Setting, TracedModel
from phalanx.training.inputs import ExpectedEvaluation, Finding, Inputs, TrainableModel, Verification
from phalanx.verification.family import VerifiableModel, most_stages


class DeclaredBlocks(DeclaredModel):
    """What a network of blocks declares; costs and sizes are counted on its modules."""

    model: BlockModel
    network: type[BlockNetwork]
    """Class of the network."""

    def initial_rules(self) -> InitRules:
        """Return initial values by parameter name; see `BlockNetwork`."""
        return self.network.initial_rules(self.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """Return the kind of the parameter `name`; see `BlockNetwork`."""
        return self.network.parameter_kind(name)

    def splits(self) -> Splits:
        """Return how modules may be split over `tp`; see `BlockNetwork`."""
        return self.network.splits(self.model)

    def split_counts(self) -> list[SplitCount]:
        """Return the units of the linear layers that are split, which a tensor-parallel degree must divide."""
        return count_split_units(self.model)

    def block_costs(self) -> tuple[float, float]:
        """Return the floating-point operations of the embedding and of the head, in those of one block."""
        embedding, block, head = part_flops(self.model, self.length)
        # A block without any matmul counts nothing.
        return embedding / max(block, 1), head / max(block, 1)


class BlockParts(DeclaredBlocks, PartTracer):
    """The parts of networks of blocks."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.network = find_network(setting.model)

    def build_stage(self, name: PartName, share: SequenceShare, stream: Stream | None) -> Stage:
        """See `PartTracer`."""
        dtype = PRECISIONS[self.setting.precision].compute_dtype
        with torch.device("meta"):
            part = self.network(self.model, dtype=dtype, part=MODEL_PARTS[name])
        stream_matrices(part, self.splits(), share.tp, stream)
        return BlockStage(part.to(dtype), 0, share, seed=0, length=self.setting.length)

    def whole_part(self, part: ModelChunk) -> nn.Module:
        """See `PartTracer`."""
        with torch.device("meta"):
            return self.network(self.model, part=part)

    def example_batch(self, name: PartName, stage: Stage, samples: int) -> dict[str, Tensor]:
        """See `PartTracer`."""
        meta = torch.device("meta")
        inputs, targets = (spec.zeros(samples, self.setting.length, meta) for spec in self.network.specs(self.model))
        if name != "embedding":
            inputs = torch.empty(stage.hidden_shape(samples), dtype=stage.part.dtype, device=meta, requires_grad=True)
        return {
            "x": inputs,
            "targets": targets,
            "sample_indices_B": torch.empty(samples, dtype=torch.int64, device=meta),
        }


class BoundBlocks(DeclaredBlocks, TracedModel, TrainableModel, VerifiableModel):
    """A network of blocks bound to its run. A family names its `network`, and overrides what it knows better."""

    run: BlockRun
    tracer = BlockParts
    position_unit = "positions"

    def __init__(self, run: BlockRun) -> None:
        super().__init__(run)
        # Without a split all ranks of `tp` would compute the same. Nothing joins positions over `cp`.
        split = {"tp"} if self.splits() else set()
        self.axes = frozenset({"dp_replicate", "dp_shard", "pp", *split})

    # --- what it declares ----------------------------------------------------------------------------------------------

    def positions(self) -> SplitCount:
        """Return the positions of a sample of the data source."""
        return SplitCount("data.sequence_length", self.run.data.sequence_length)

    def flops_per_sample(self) -> float:
        """Return the operations that are counted on the modules, forward and backward."""
        embedding, block, head = part_flops(self.model, self.length)
        return float(embedding + self.model.n_layers * block + head)

    # --- layouts -------------------------------------------------------------------------------------------------------

    def build(self, building: BuildContext, part: ModelChunk) -> tuple[BlockNetwork, TensorSplits]:
        """See `LayoutModel`."""
        with torch.device("meta"):
            network = self.network(self.model, dtype=self.precision.compute_dtype, part=part)
        return network, building.split_parameters(network, self.splits())

    def build_stage(self, building: BuildContext, part: ModelChunk, index: int) -> tuple[Stage, TensorSplits]:
        """See `LayoutModel`."""
        network, splits = self.build(building, part)
        return BlockStage(network, index, building.share, self.run.training.seed, self.length), splits

    # --- the planner ---------------------------------------------------------------------------------------------------

    def gathered_setting(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """See `TracedModel`."""
        return Setting(
            model=self.model,
            length=self.length,
            tp=layout.tp,
            recompute=layout.recompute,
            precision=self.run.layout.precision,
            attention=attention,
            compile=compiled,
        )

    def likely_kernel(self, *, rocm: bool) -> Kernel:
        """See `TracedModel`; the network computes attention, if it has any, as it is written."""
        return "flash"

    def sample_bytes(self) -> int:
        """Return the bytes of inputs and targets."""
        return sum(spec.sample_bytes(self.length) for spec in self.network.specs(self.model))

    def example_batch(self, samples: int, device: torch.device) -> SampleBatch:
        """See `TracedModel`."""
        specs, length = self.network.specs(self.model), self.length
        inputs, targets = (spec.zeros(samples, length, device) for spec in specs)
        return SampleBatch(inputs, targets, torch.arange(samples, device=device))

    # --- training ------------------------------------------------------------------------------------------------------

    def open_source(self) -> DataSource:
        """Return the data source that the run file names; see `data.sources.open_source`."""
        data = self.run.data
        return open_source(data.source, data.sequence_length, data.options)

    def open_inputs(self, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
        """See `TrainableModel`."""
        data, specs = self.run.data, self.network.specs(self.model)
        reader = SourceReader(self.open_source(), self.run.training.seed, data.sequence_length, specs)
        stream = SampleStream(
            reader,
            global_batch=batch_sizes(self.run),
            rank=mesh.data_rank,
            ranks=layout.data_ranks,
            prefetch=data.prefetch,
            pin_memory=device.type != "cpu",
        )
        evaluator = HeldOutEvaluator(reader, self.run.evaluation.samples, device)
        # A source has no checksums of its own that could be compared: it is trusted as it is.
        return Inputs(stream, evaluator, Verification([]), in_words=reader.source.describe())

    def check_inputs(self) -> str:
        """See `families.family.DataModel`."""
        return self.open_source().describe()

    def expected_evaluation(self) -> ExpectedEvaluation | None:
        """See `families.family.DataModel`."""
        if not self.open_source().count_items("validation"):
            return None
        return ExpectedEvaluation(dict(evaluation_fields(0.0, 0)), frozenset(("loss",)))

    # --- verification --------------------------------------------------------------------------------------------------

    def samples(self, step: int, first: int, count: int, global_batch: int) -> SampleBatch:
        """Return random inputs and targets, of which some targets are left out.

        Some samples have more of these than others, so that an average over ranks in place of a sum over targets shows.
        """
        numbers = torch.arange(first, first + count) + (step - 1) * global_batch
        length = self.length
        inputs, targets = (
            spec.random_samples(what, numbers, length)
            for what, spec in zip(("inputs", "targets"), self.network.specs(self.model), strict=True)
        )
        # Every eighth position to every second one, by the number of the sample.
        left_out = (torch.arange(length)[None] + numbers[:, None]) % 8 < 1 + numbers[:, None] % 4
        targets[left_out] = torch.nan if targets.dtype.is_floating_point else -1
        assert not valid_targets(targets).all()
        return SampleBatch(inputs, targets, numbers)

    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Return fields of a run with fewer blocks; widths and positions stay.

        Override it for a model that is too wide for the CPU.
        """
        layers = min(self.model.n_layers, max(3, most_stages(self.run, world_size) + 1))
        return {"model": {**self.model.model_dump(), "preset": None, "n_layers": layers}}

    def in_words(self) -> str:
        """Return the sizes of the network."""
        model = self.model
        return (
            f"{model.family}: {model.n_layers} blocks, width {model.d_model}, {self.run.data.sequence_length} positions"
        )


class BlockStage(Stage):
    """Samples in, hidden activations between stages, the summed loss of this rank's positions out."""

    loss_is_whole = False

    def __init__(self, part: BlockNetwork, index: int, share: SequenceShare, seed: int, length: int) -> None:
        super().__init__(part, index, share, seed, length)
        self.inputs: TensorSpec = part.specs(part.config)[0]

    def forward(
        self, x: Tensor, sample_indices_B: Tensor, *, training: TrainingPass | None = None, **inputs: Any
    ) -> Tensor:
        """See `Stage`. x: samples [B, S, ...] in the first stage. inputs: targets [B, S, ...]; without them the last stage
        gives predictions of this rank's positions."""
        rows_S = self.share.positions(self.length, x.device).rows_S
        # Batches are whole samples: each rank of `tp` takes its positions of inputs and of targets.
        if self.part.part.first:
            x = self.part.embedding(x[:, rows_S], rows_S).to(self.part.dtype)
        for block in self.part.blocks:
            x = block(x)
        if not self.part.part.last:
            return x
        predicted: Tensor = self.part.head(x)
        targets = inputs.get("targets")
        if targets is None:
            return predicted
        loss: Tensor = self.part.loss(predicted, targets[:, rows_S])
        # Not a view, which FSDP2 warns of.
        return torch.stack((loss,))


def evaluation_fields(loss: float, samples: int) -> dict[str, float]:
    """Return what an evaluation writes down: the mean loss a target, and over how many samples."""
    return {"loss": loss, "samples": samples}


@dataclass(frozen=True)
class HeldOutEvaluator:
    """Computes the loss of the same held-out items again and again."""

    reader: SourceReader
    samples: int
    """Items that an evaluation reads at most."""
    device: torch.device

    def evaluate(self, executor: Executor) -> list[Finding]:
        """Return the mean loss a target over items spread evenly over the validation split; every rank calls it."""
        held_out = self.reader.source.count_items("validation")
        if not held_out:
            return []
        items = np.unique(np.linspace(0, held_out - 1, min(self.samples, held_out)).round().astype(np.int64))
        layout, mesh = executor.layout, executor.mesh
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        size = layout.microbatch
        for start in range(0, len(items), size * layout.data_ranks):
            # A sharded model needs all ranks, a pipeline micro-batches of one size: what is missing repeats the last item.
            places = np.arange(size) + start + mesh.data_rank * size
            batch = self.reader.read_items("validation", items[np.minimum(places, len(items) - 1)], places)
            targets = batch.targets.clone()
            targets[torch.from_numpy(places >= len(items))] = torch.nan if targets.dtype.is_floating_point else -1
            batch = type(batch)(batch.samples, targets, batch.sample_indices).to(self.device)
            count = batch.target_counts().double() if mesh.reads_first else torch.zeros(1, device=self.device)
            sums += torch.cat((executor.evaluate(batch), count))
        if mesh.world is not None:
            dist.all_reduce(sums, group=mesh.world)
        loss = float(sums[0] / sums[1].clamp(min=1))
        return [Finding("evaluation", evaluation_fields(loss, len(items)), f"held-out loss {loss:.5g}")]


# --- sizes: the functions of `config.families.Sizes` ---------------------------------------------------------------------


def parameter_count(model: BlockModel) -> int:
    """Return the number of all trainable parameters."""
    return sum(parameter.numel() for parameter in whole_network(model).parameters())


def matmul_parameters(model: BlockModel) -> int:
    """Return the number of parameters that multiply every position: those of the kind `matrix`."""
    network = whole_network(model)
    named = network.named_parameters()
    return sum(parameter.numel() for name, parameter in named if network.parameter_kind(name) == "matrix")


def in_words(model: BlockModel) -> str:
    """Return the shape for a person."""
    return f"{model.family}, {model.n_layers} blocks x {model.d_model}"


# --- counted on the modules ----------------------------------------------------------------------------------------------


def find_network(model: BlockModel) -> type[BlockNetwork]:
    """Return the class of the network that `model` describes."""
    return bound_class(model.family, BoundBlocks).network


@cache
def whole_network(model: BlockModel) -> BlockNetwork:
    """Return the whole network that `model` describes, on the meta device."""
    with torch.device("meta"):
        return find_network(model)(model)


@cache
def count_split_units(model: BlockModel) -> list[SplitCount]:
    """Return what a tensor-parallel degree must divide for the linear layers that the network splits."""
    network = whole_network(model)
    splits = network.splits(model)
    found: dict[SplitCount, None] = {}
    for name, module in network.named_modules():
        split = next((split for pattern, split in splits if fnmatchcase(name, pattern)), None)
        if split is not None and isinstance(module, Linear):
            features = module.weight.shape[1 if split.kind == "row" else 0]
            kind = "inputs" if split.kind == "row" else "outputs"
            # Blocks are alike: the first of them stands for all.
            parts = name.split(".")
            field = f"{kind} of {'.'.join('*' if part.isdecimal() else part for part in parts)}"
            found[SplitCount(field, features // split.unit, split.unit)] = None
    return list(found)


@cache
def part_flops(model: BlockModel, positions: int) -> tuple[int, int, int]:
    """Return the FLOPs of one sample in the embedding, a block and the head, forward and backward, by PyTorch's count."""

    def count(compute: Callable[[], Tensor]) -> int:
        # Forward and backward: some blocks recompute or skip work that a factor of 3 would not know of.
        with FlopCounterMode(display=False) as counter:
            compute().backward()
        return int(counter.get_total_flops())

    # Blocks are alike: one stands for all. On meta, operations have shapes and so a count, and take no time.
    kind, meta = find_network(model), torch.device("meta")
    with meta:
        network = kind(model.model_copy(update={"n_layers": 1}))
        hidden = torch.empty((1, positions, model.d_model), requires_grad=True)
    inputs, targets = (spec.zeros(1, positions, meta) for spec in kind.specs(model))
    (block,) = network.blocks
    return (
        count(lambda: network.embedding(inputs, torch.arange(positions, device=meta)).sum()),
        count(lambda: block(hidden).sum()),
        count(lambda: network.loss(network.head(hidden), targets)),
    )
