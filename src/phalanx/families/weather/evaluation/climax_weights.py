"""Weights of a published ClimaX as a checkpoint of ours: equal in its forecasts, or refused by name.

Reads the state dict of a `ClimaX` (Nguyen et al. 2023, arXiv:2301.10343; microsoft/ClimaX: src/climax/arch.py) from a
safetensors file, as Lightning saves it (names begin with `net.`) or as the network alone. What it does not say is given:
names of variables, heads, and the grid where it is not twice as wide as high (docs/guides/convert.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.checkpoint import CheckpointStore
from phalanx.checkpoint.state_dict import StateDict
from phalanx.config.load import dump_run, parse_run, to_yaml
from phalanx.config.presets import load_preset
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.forecaster import Forecaster
from phalanx.files import new_folder, write_atomically
from phalanx.training.transfer import MODEL

PUBLISHED_HEADS = 16
"""Attention heads of every published checkpoint."""
STATICS = ("land_sea_mask", "orography", "lattitude")
"""Variables without time, spelt as published."""
_TAKES = "models of the published src/climax/arch.py are read"
_EARLIER = {"channel_embed": "var_embed", "channel_query": "var_query", "channel_agg": "var_agg"}
"""What the first checkpoints call parts of today's code."""

_OWN_PARTS = frozenset({"token_embeds", "var_query", "lead_time_embed"})
"""Parts of ClimaX that no other file that we read has."""


@dataclass(frozen=True)
class ImportedForecaster:
    """What was written."""

    target: Path
    model: WeatherModel
    parameters: int


def holds_climax(source: Path) -> bool:
    """Return whether a file is a state dict with names of ClimaX's; only its names are read."""
    try:
        with safe_open(source, framework="pt") as file:
            return any(_network_name(name).partition(".")[0] in _OWN_PARTS for name in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def import_climax(
    source: Path,
    target: Path,
    dtype: torch.dtype = torch.float32,
    *,
    variables: Sequence[str] | None = None,
    heads: int = PUBLISHED_HEADS,
    grid: tuple[int, int] | None = None,
) -> ImportedForecaster:
    """Write the weights in the safetensors file `source` as the new folder `target`: checkpoints/ and run.yaml.

    dtype: number format of the weights. variables: names in the order of `default_vars`; None means the 48 of the published
    checkpoints. heads: attention heads. grid: rows and columns; None means twice as many columns as rows. Raises
    CheckpointError where the file is none, or our model computes something else than its, and ConfigError for a `target` in
    use or a setting that does not fit the file.
    """
    state = StateDict(source, _TAKES, rename=_network_name)
    model = describe_model(state, variables, heads, grid)
    tensors = convert_weights(state, model)
    state.refuse_unread()
    with torch.device("meta"):
        wanted = Forecaster(model).state_dict()
    # Other shapes than the model's are told by their names as they are read.
    assert {name: tensor.shape for name, tensor in wanted.items()} == {n: t.shape for n, t in tensors.items()}
    with new_folder(target) as folder:
        text = to_yaml(_run_file(model, target))
        run = parse_run(text, f"{target}/run.yaml")
        with CheckpointStore(folder / "checkpoints", keep_last=1) as store:
            about = {"step": 0, "weights_only": True, "run": dump_run(run), "imported_from": source.name}
            store.save(0, {MODEL + name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, about)
        write_atomically(
            folder / "run.yaml",
            f"# Begins with the weights of ClimaX in {source.name}. Name your fields in data.sources, then:\n"
            f"#     phalanx train {target}/run.yaml\n"
            "# Variables may be left out of inputs and outputs, in model and data alike.\n" + text,
        )
    return ImportedForecaster(target, model, sum(tensor.numel() for tensor in tensors.values()))


def _network_name(name: str) -> str:
    """Return the name of a tensor in today's network."""
    inner = name.removeprefix("net.")
    first, dot, rest = inner.partition(".")
    return _EARLIER.get(first, first) + dot + rest


def describe_model(
    state: StateDict, variables: Sequence[str] | None, heads: int, grid: tuple[int, int] | None
) -> WeatherModel:
    """Return the model section whose forecaster computes what the state dict's model does; see `import_climax`."""
    weight_VDHW = _read_patch_weights(state)
    count, width, patch, _ = weight_VDHW.shape
    published = WeatherModel.model_validate(load_preset("climax").fields)
    names = published.variables if variables is None else tuple(variables)
    if len(names) != count:
        given = "--variables names" if variables is not None else "without --variables, there are"
        raise ConfigError(
            f"{state.where} has {count} variables, {given} {len(names)}; give --variables, in the order of default_vars in "
            "the configuration that it was trained with"
        )
    rows, columns = _find_grid(state, patch, grid)
    if width % heads:
        raise ConfigError(
            f"--heads={heads} does not divide the width {width} of {state.where}; give --heads as trained"
        )
    changing = [name for name in names if name not in STATICS]
    fields = {
        "family": "weather",
        "n_layers": state.count("blocks.{}.attn.qkv.weight"),
        "d_model": width,
        "n_heads": heads,
        "d_ff": len(state.read("blocks.0.mlp.fc1.weight")),
        "n_lat": rows,
        "n_lon": columns,
        "patch_size": patch,
        "decoder_depth": _count_head_layers(state) - 1,
        "variables": names,
        # Data name fields without time after the others; the order of variables changes nothing in their aggregation.
        "inputs": [*changing, *(name for name in names if name in STATICS)],
        "outputs": changing,
        # As published: rates of training are no part of a state dict.
        "dropout": published.dropout,
        "drop_path": published.drop_path,
    }
    try:
        return WeatherModel.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(f"{state.where}: model.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _read_patch_weights(state: StateDict) -> Tensor:
    """Return the patch embeddings of all variables, [V, D, p, p], from one tensor or one for each variable."""
    if "token_embeds.proj_weights" in state:
        weight = state.read("token_embeds.proj_weights")
    else:
        first = state.read("token_embeds.0.proj.weight")
        count = state.count("token_embeds.{}.proj.weight")
        weight = torch.stack([state.shaped(f"token_embeds.{n}.proj.weight", *first.shape) for n in range(count)])
    if weight.ndim != 5 or weight.shape[2] != 1 or weight.shape[3] != weight.shape[4]:
        state.refuse(f"token_embeds has weights of the shape {list(weight.shape)}, [variables, width, 1, p, p] is read")
    return weight[:, :, 0]


def _find_grid(state: StateDict, patch: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """Return rows and columns of the grid."""
    # The last but one dimension: [1, L, D].
    patches = state.read("pos_embed").flatten(0, -2).shape[0]
    if grid is None:
        side = math.isqrt(patches // 2)
        if 2 * side**2 != patches:
            raise ConfigError(
                f"{state.where} has {patches} patches of {patch} x {patch}, which is no grid twice as wide as high; give "
                "--grid ROWSxCOLUMNS"
            )
        return side * patch, 2 * side * patch
    if any(edge % patch for edge in grid) or grid[0] * grid[1] != patches * patch**2:
        raise ConfigError(
            f"--grid={grid[0]}x{grid[1]} is not {patches} patches of {patch} x {patch}, which {state.where} has; give "
            "--grid ROWSxCOLUMNS as trained"
        )
    return grid


def _count_head_layers(state: StateDict) -> int:
    """Return the linear layers of the head: between any two stands a GELU, which takes a number."""
    layers = 0
    while f"head.{2 * layers}.weight" in state:
        layers += 1
    if not layers:
        state.read("head.0.weight")
    return layers


def convert_weights(state: StateDict, model: WeatherModel) -> dict[str, Tensor]:
    """Return the parameters of our forecaster by name, float64."""
    width, count = model.d_model, len(model.variables)
    if "token_embeds.proj_biases" in state:
        bias_VD = state.shaped("token_embeds.proj_biases", count, width)
    else:
        bias_VD = torch.stack([state.shaped(f"token_embeds.{n}.proj.bias", width) for n in range(count)])
    tensors = {
        "embedding.patches.weight": _read_patch_weights(state).flatten(2),
        "embedding.patches.bias": bias_VD,
        "embedding.variables": state.shaped("var_embed", 1, count, width)[0],
        "embedding.aggregation.queries": state.shaped("var_query", 1, 1, width)[0],
        "embedding.positions": state.shaped("pos_embed", 1, model.n_locations, width)[0],
    }
    tensors |= _convert_linear(state, "lead_time_embed", "embedding.lead", width, 1)
    # Of the bias of queries, keys and values, that of the keys adds the same to all scores of a query: it changes nothing.
    weights = state.shaped("var_agg.in_proj_weight", 3 * width, width).split(width)
    biases = state.shaped("var_agg.in_proj_bias", 3 * width).split(width)
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        tensors[f"embedding.aggregation.{name}.weight"] = weight
        if name != "key":
            tensors[f"embedding.aggregation.{name}.bias"] = bias
    tensors |= _convert_linear(state, "var_agg.out_proj", "embedding.aggregation.output", width, width)
    for number in range(model.n_layers):
        tensors |= _convert_block(state, model, f"blocks.{number}")
    tensors |= _convert_norm(state, "norm", "head.norm", width)
    for number in range(model.decoder_depth):
        tensors |= _convert_linear(state, f"head.{2 * number}", f"head.layers.{number}", width, width)
    points = model.patch_size**2
    output = _convert_linear(state, f"head.{2 * model.decoder_depth}", "head.output", count * points, width)
    # Rows by point, then variable there; by variable, then point here.
    return tensors | {name: _swap_rows(tensor, points, count) for name, tensor in output.items()}


def _convert_block(state: StateDict, model: WeatherModel, block: str) -> dict[str, Tensor]:
    """Return the parameters of a block, whose names begin alike here and there."""
    width, hidden = model.d_model, model.ff_size
    tensors = _convert_norm(state, f"{block}.norm1", f"{block}.attention_norm", width)
    qkv = _convert_linear(state, f"{block}.attn.qkv", f"{block}.attention.qkv", 3 * width, width)
    # Rows by query, key and value, then head there; by head, then query, key and value here.
    for name, tensor in qkv.items():
        by_head = tensor.unflatten(0, (3, model.n_heads, model.head_size)).transpose(0, 1)
        tensors[name] = by_head.flatten(0, 2)
    tensors |= _convert_linear(state, f"{block}.attn.proj", f"{block}.attention.output", width, width)
    tensors |= _convert_norm(state, f"{block}.norm2", f"{block}.mlp_norm", width)
    tensors |= _convert_linear(state, f"{block}.mlp.fc1", f"{block}.mlp.up", hidden, width)
    return tensors | _convert_linear(state, f"{block}.mlp.fc2", f"{block}.mlp.down", width, hidden)


def _convert_linear(state: StateDict, theirs: str, ours: str, outside: int, inside: int) -> dict[str, Tensor]:
    return {
        f"{ours}.weight": state.shaped(f"{theirs}.weight", outside, inside),
        f"{ours}.bias": state.shaped(f"{theirs}.bias", outside),
    }


def _convert_norm(state: StateDict, theirs: str, ours: str, width: int) -> dict[str, Tensor]:
    return {f"{ours}.{kind}": state.shaped(f"{theirs}.{kind}", width) for kind in ("weight", "bias")}


def _swap_rows(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return `tensor` with its rows, numbered by (outer, inner), in the order of (inner, outer)."""
    swapped: Tensor = tensor.unflatten(0, (outer, inner)).transpose(0, 1).flatten(0, 1)
    return swapped


def _run_file(model: WeatherModel, target: Path) -> dict[str, Any]:
    """Return the sections of a run that begins with these weights; its fields are for a person to name.

    Rates are those that ClimaX's documentation gives for fine-tuning the published weights, and years those of its data.
    """
    return {
        "model": model.model_dump(mode="json", exclude_none=True, exclude_defaults=True) | {"family": "weather"},
        "data": {
            "sources": ["data/weather.zarr"],
            "inputs": [name for name in model.input_names if name not in STATICS],
            "static": [name for name in model.input_names if name in STATICS],
            "lead_hours": 72,
            "splits": {
                "train": {"first": "1979", "last": "2015"},
                "validation": {"first": "2016", "last": "2016"},
                "test": {"first": "2017", "last": "2018"},
            },
        },
        "layout": {"global_batch": 128, "precision": "fp32"},
        "optimizer": {"lr": 5e-7, "betas": [0.9, 0.99], "weight_decay": 1e-5, "warmup_steps": 100},
        "training": {"steps": 2000, "init_from": str(target)},
    }
