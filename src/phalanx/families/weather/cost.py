"""The weather family as cost models see it: see `planner.trace.family`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config.families import WeatherRun
from phalanx.config.weather import WeatherModel
from phalanx.errors import ConfigError
from phalanx.families.weather import declare
from phalanx.families.weather.declare import tensor_splits
from phalanx.families.weather.layout import WeatherStage, share_embedding
from phalanx.families.weather.model.block import Attention, AttentionCore
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.layout.context_parallel.sequence_share import SequenceShare
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.stage import Stage
from phalanx.layout.streamed_weights.stream_pairs import Stream, stream_matrices
from phalanx.nn.kinds import ParameterKind
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.family import MODEL_PARTS, Kernel, PartName, Setting, sdpa_choice
from phalanx.planner.trace.recorder import Recorder
from phalanx.precision import PRECISIONS


def setting_of(run: WeatherRun, layout: ResolvedLayout, *, attention: Kernel, compiled: bool) -> Setting:
    """See `family.CostFamily`. Raises ConfigError for roll-outs, whose earlier steps no part's costs hold."""
    if run.data.rollout_hours is not None:
        raise ConfigError(
            f"data.rollout_hours={run.data.rollout_hours}: plans know single steps alone; plan with data.rollout_hours=null "
            "(a roll-out adds forward passes, and no memory to speak of)"
        )
    return Setting(
        model=run.model,
        length=run.model.n_tokens,
        tp=layout.tp,
        recompute=run.layout.recompute,
        precision=run.layout.precision,
        attention=attention,
        compile=compiled,
    )


def likely_kernel(run: WeatherRun, *, rocm: bool) -> Kernel:
    """See `family.CostFamily`; there is neither bias nor mask."""
    return sdpa_choice(run.training.attention, run.layout.precision, biased=False, rocm=rocm)


def chunk_tokens(run: WeatherRun, tp: int) -> int:
    """See `family.CostFamily`; there are no logits."""
    return Setting.chunk_tokens


def sample_bytes(run: WeatherRun) -> int:
    """Whole fields and targets, float32, on every rank."""
    model = run.model
    return 4 * model.n_lat * model.n_lon * (len(model.input_names) + len(model.output_names))


def build_stage(name: PartName, setting: Setting, share: SequenceShare, stream: Stream | None) -> Stage:
    """See `family.CostFamily`."""
    model, dtype = _model(setting), PRECISIONS[setting.precision].compute_dtype
    with torch.device("meta"):
        part = Forecaster(model, dtype=dtype, part=MODEL_PARTS[name])
    stream_matrices(part, tensor_splits(model), share.tp, stream)
    share_embedding(part, share.tp)
    core = _core(setting.attention)
    for module in part.modules():
        if isinstance(module, Attention):
            module.attend = core
    return WeatherStage(part.to(dtype), 0, share, seed=0)


def whole_part(setting: Setting, part: ModelChunk) -> nn.Module:
    """See `family.CostFamily`."""
    with torch.device("meta"):
        return Forecaster(_model(setting), part=part)


def example_batch(name: PartName, stage: Stage, setting: Setting, samples: int) -> dict[str, Tensor]:
    """See `family.CostFamily`."""
    model = _model(setting)
    fields, targets = (
        torch.empty((samples, len(names), model.n_lat, model.n_lon), device="meta")
        for names in (model.input_names, model.output_names)
    )
    x = fields
    if name != "embedding":
        x = torch.empty(stage.hidden_shape(samples), dtype=stage.part.dtype, device="meta", requires_grad=True)
    return {
        "x": x,
        "sample_indices_B": torch.empty(samples, dtype=torch.int64, device="meta"),
        "lead_hours_B": torch.empty(samples, device="meta"),
        "fields_BVHW": fields,
        "targets_BVHW": targets,
    }


def fuse_norms(stage: Stage, recorder: Recorder) -> None:
    """PyTorch's LayerNorm is one kernel as it is."""


def parameter_kind(name: str) -> ParameterKind:
    """See `family.CostFamily`."""
    return declare.parameter_kind(name)


def relative_block_costs(setting: Setting) -> tuple[float, float]:
    """See `family.CostFamily`."""
    return declare.relative_block_costs(_model(setting))


def tied(model: WeatherModel) -> dict[str, str]:
    """Nothing."""
    return {}


def _model(setting: Setting) -> WeatherModel:
    assert isinstance(setting.model, WeatherModel)
    return setting.model


@cache
def _core(kernel: Kernel) -> AttentionCore:
    """Attention of all tokens to all, as `kernel` computes it on meta, where PyTorch would take it apart."""
    operations = torch.ops.aten
    cores: dict[Kernel, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "flash": lambda q, k, v: operations._scaled_dot_product_flash_attention(q, k, v)[0],
        "cudnn": lambda q, k, v: operations._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
        "efficient": lambda q, k, v: operations._scaled_dot_product_efficient_attention(q, k, v, None, True)[0],
        "math": F.scaled_dot_product_attention,
        "cpu": lambda q, k, v: operations._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
    }
    return cores[kernel]
