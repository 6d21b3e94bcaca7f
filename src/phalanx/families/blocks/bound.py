"""A model of blocks bound to its run: everything that layouts, training, the planner and verification ask for follows from
its network and its data source."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.config.model import BlockModel
from phalanx.data.sources import DataSource, SampleBatch, SampleStream, SourceReader, open_source, valid_targets
from phalanx.families.blocks.config import BlockRun
from phalanx.families.blocks.inputs import HeldOutEvaluator, evaluation_fields
from phalanx.families.blocks.network import BlockNetwork, count_splits
from phalanx.families.blocks.stage import BlockStage
from phalanx.families.registry import bound_class
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.family import BuildContext
from phalanx.layout.mesh import Mesh
from phalanx.layout.place import TensorSplits
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.layout.streamed_weights.stream_pairs import Stream, stream_matrices
from phalanx.nn.initial import InitRules
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.precision import PRECISIONS
from phalanx.nn.splits import ModelChunk, SplitCount
from phalanx.planner.trace.traced_model import MODEL_PARTS, Kernel, PartName, PartTracer, Setting, TracedModel
from phalanx.training.inputs import ExpectedEvaluation, Inputs, TrainableModel, Verification
from phalanx.verification.family import VerifiableModel, most_stages


class BlockParts(PartTracer):
    """The parts of networks of blocks."""

    @property
    def network(self) -> type[BlockNetwork]:
        """The kind of network."""
        return bound_class(self.model.family, BoundBlocks).network

    def build_stage(self, name: PartName, share: SequenceShare, stream: Stream | None) -> Stage:
        """See `PartTracer`."""
        dtype = PRECISIONS[self.setting.precision].compute_dtype
        with torch.device("meta"):
            part = self.network(self.model, dtype=dtype, part=MODEL_PARTS[name])
        stream_matrices(part, part.splits(self.model), share.tp, stream)
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

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `PartTracer`."""
        return self.network.parameter_kind(name)

    def relative_block_costs(self) -> tuple[float, float]:
        """See `PartTracer`."""
        return relative_flops(self.model, self.setting.length)


class BoundBlocks(TracedModel, TrainableModel, VerifiableModel):
    """A network of blocks bound to its run. A family names its `network`, and overrides what it knows better."""

    run: BlockRun
    network: ClassVar[type[BlockNetwork]]
    """The kind of network."""

    tracer = BlockParts
    position_unit = "positions"

    def __init__(self, run: BlockRun) -> None:
        super().__init__(run)
        # Without a split all ranks of `tp` would compute the same. Nothing joins positions over `cp`.
        split = {"tp"} if self.network.splits(run.model) else set()
        self.axes = frozenset({"dp_replicate", "dp_shard", "pp", *split})

    # --- what it declares ----------------------------------------------------------------------------------------------

    def positions(self) -> SplitCount:
        """Those of a sample of the data source."""
        return SplitCount("data.sequence_length", self.run.data.sequence_length)

    def initial_rules(self) -> InitRules:
        """See `BlockNetwork`."""
        return self.network.initial_rules(self.run.model)

    def parameter_kind(self, name: str) -> ParameterKind:
        """See `BlockNetwork`."""
        return self.network.parameter_kind(name)

    def split_counts(self) -> list[SplitCount]:
        """Units of the linear layers that are split."""
        return split_counts_of(self.run.model)

    def block_costs(self) -> tuple[float, float]:
        """By floating-point operations."""
        return relative_flops(self.run.model, self.run.data.sequence_length)

    def parameter_count(self) -> int:
        """Counted on the modules."""
        return sum(parameter.numel() for parameter in whole_network(self.run.model).parameters())

    def flops_per_sample(self) -> float:
        """Counted on the operations of the modules, forward and backward."""
        model = self.run.model
        embedding, block, head = part_flops(model, self.run.data.sequence_length)
        return float(embedding + model.n_layers * block + head)

    # --- layouts -------------------------------------------------------------------------------------------------------

    def build(self, building: BuildContext, part: ModelChunk) -> tuple[nn.Module, TensorSplits]:
        """See `LayoutModel`."""
        with torch.device("meta"):
            network = self.network(self.run.model, dtype=PRECISIONS[self.run.layout.precision].compute_dtype, part=part)
        splits = network.splits(self.run.model)
        return network, building.sharding.split_parameters(network, splits, building.share.tp)

    def stage(self, building: BuildContext, part: nn.Module, index: int) -> Stage:
        """See `LayoutModel`."""
        assert isinstance(part, BlockNetwork)
        return BlockStage(part, index, building.share, self.run.training.seed, self.run.data.sequence_length)

    # --- the planner ---------------------------------------------------------------------------------------------------

    def setting_of(self, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
        """See `TracedModel`."""
        return Setting(
            model=self.run.model,
            length=self.run.data.sequence_length,
            tp=layout.tp,
            recompute=self.run.layout.recompute,
            precision=self.run.layout.precision,
            attention=attention,
            compile=compiled,
        )

    def likely_kernel(self, *, rocm: bool) -> Kernel:
        """See `TracedModel`; the network computes attention, if it has any, as it is written."""
        return "flash"

    def sample_bytes(self) -> int:
        """Inputs and targets."""
        return sum(spec.sample_bytes(self.run.data.sequence_length) for spec in self.network.specs(self.run.model))

    def example_batch(self, samples: int, device: torch.device) -> SampleBatch:
        """See `TracedModel`."""
        specs, length = self.network.specs(self.run.model), self.run.data.sequence_length
        inputs, targets = (spec.zeros(samples, length, device) for spec in specs)
        return SampleBatch(inputs, targets, torch.arange(samples, device=device))

    # --- training ------------------------------------------------------------------------------------------------------

    def open_source(self) -> DataSource:
        """Return the data source that the run file names; see `data.sources.open_source`."""
        data = self.run.data
        return open_source(data.source, data.sequence_length, data.options)

    def open_inputs(self, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
        """See `TrainableModel`."""
        data, specs = self.run.data, self.network.specs(self.run.model)
        reader = SourceReader(self.open_source(), self.run.training.seed, data.sequence_length, specs)
        stream = SampleStream(
            reader,
            global_batch=layout.global_batch,
            rank=mesh.data_rank,
            ranks=layout.data_ranks,
            prefetch=data.prefetch,
            pin_memory=device.type != "cpu",
        )
        evaluator = HeldOutEvaluator(reader, self.run.evaluation.samples, device)
        # A source has no checksums of its own that could be compared: it is trusted as it is.
        return Inputs(stream, evaluator, Verification([]), in_words=reader.source.describe())

    def check_inputs(self) -> str:
        """See `TrainableModel`."""
        return self.open_source().describe()

    def expected_evaluation(self) -> ExpectedEvaluation | None:
        """See `TrainableModel`."""
        if not self.open_source().count_items("validation"):
            return None
        return ExpectedEvaluation(dict(evaluation_fields(0.0, 0)), frozenset(("loss",)))

    # --- verification --------------------------------------------------------------------------------------------------

    def samples(self, step: int, first: int, count: int, global_batch: int) -> SampleBatch:
        """Random inputs and targets; some targets are left out, more in some samples than in others, so that an average over
        ranks in place of a sum over targets shows."""
        numbers = torch.arange(first, first + count) + (step - 1) * global_batch
        length = self.run.data.sequence_length
        inputs, targets = (
            spec.random_samples(what, numbers, length)
            for what, spec in zip(("inputs", "targets"), self.network.specs(self.run.model), strict=True)
        )
        # Every eighth position to every second one, by the number of the sample.
        left_out = (torch.arange(length)[None] + numbers[:, None]) % 8 < 1 + numbers[:, None] % 4
        targets[left_out] = torch.nan if targets.dtype.is_floating_point else -1
        assert not valid_targets(targets).all()
        return SampleBatch(inputs, targets, numbers)

    def reduced(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Fewer blocks; widths and positions as they are. Override it for a model that is too wide for the CPU."""
        layers = min(self.run.model.n_layers, max(3, most_stages(self.run, world_size) + 1))
        return {"model": {**self.run.model.model_dump(), "preset": None, "n_layers": layers}}

    def in_words(self) -> str:
        """Sizes of the network."""
        model = self.run.model
        return (
            f"{model.family}: {model.n_layers} blocks, width {model.d_model}, {self.run.data.sequence_length} positions"
        )


@cache
def whole_network(model: BlockModel) -> BlockNetwork:
    """Return the whole network that `model` describes, on the meta device."""
    with torch.device("meta"):
        return bound_class(model.family, BoundBlocks).network(model)


@cache
def split_counts_of(model: BlockModel) -> list[SplitCount]:
    """Return what a tensor-parallel degree must divide for the linear layers that the network splits."""
    network = whole_network(model)
    return count_splits(network, network.splits(model))


@cache
def part_flops(model: BlockModel, positions: int) -> tuple[int, int, int]:
    """Return the FLOPs of one sample in the embedding, a block and the head, forward and backward, by PyTorch's count."""
    # Blocks are alike: one stands for all. On meta, operations have shapes and so a count, and take no time.
    kind, meta = bound_class(model.family, BoundBlocks).network, torch.device("meta")
    with meta:
        network = kind(model.model_copy(update={"n_layers": 1}))
        hidden = torch.empty((1, positions, model.d_model), requires_grad=True)
    inputs, targets = (spec.zeros(1, positions, meta) for spec in kind.specs(model))
    (block,) = network.blocks
    embedding = _count_flops(lambda: network.embedding(inputs, torch.arange(positions, device=meta)).sum())
    middle = _count_flops(lambda: block(hidden).sum())
    head = _count_flops(lambda: network.loss(network.head(hidden), targets))
    return embedding, middle, head


def relative_flops(model: BlockModel, positions: int) -> tuple[float, float]:
    """Return what the embedding and the head cost beside one block, in blocks."""
    embedding, block, head = part_flops(model, positions)
    # A block without any matmul counts nothing.
    return embedding / max(block, 1), head / max(block, 1)


def _count_flops(compute: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        compute().backward()
    return int(counter.get_total_flops())
