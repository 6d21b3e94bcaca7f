"""ClimaX written straight from its paper and published behaviour with torch's own layers: slow, and independent of ours."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.families.weather.config import WeatherModel
from phalanx.families.weather.model.forecaster import Forecaster


class PublishedBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class PublishedClimaX(nn.Module):
    """One convolution a variable, one query over the variables of each location, a ViT, and a head for all variables."""

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.config = config
        width, patch = config.d_model, config.patch_size
        self.embeds = nn.ModuleList(nn.Conv2d(1, width, patch, stride=patch) for _ in config.variables)
        self.variables = nn.Parameter(torch.randn(len(config.variables), width))
        self.queries = nn.Parameter(torch.randn(config.aggregation_queries, width))
        self.aggregation = nn.MultiheadAttention(width, config.n_heads, batch_first=True)
        self.positions = nn.Parameter(torch.randn(config.n_locations, width))
        self.lead = nn.Linear(1, width)
        self.blocks = nn.ModuleList(
            PublishedBlock(width, config.n_heads, config.ff_size, config.norm_eps) for _ in range(config.n_layers)
        )
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.decoder_depth))
        self.output = nn.Linear(width * config.aggregation_queries, len(config.variables) * patch * patch)

    def forward(self, fields: Tensor, lead_hours: Tensor) -> Tensor:
        """[B, V, H, W] of the inputs -> [B, V, H, W] of the outputs."""
        config = self.config
        ids = [config.variables.index(name) for name in config.input_names]
        tokens = [self.embeds[v](fields[:, i : i + 1]).flatten(2).transpose(1, 2) for i, v in enumerate(ids)]
        stack = torch.stack(tokens, dim=2) + self.variables[ids]  # B, L, V, D
        samples, locations = stack.shape[:2]
        stack = stack.flatten(0, 1)
        query = self.queries.expand(len(stack), -1, -1)
        x = self.aggregation(query, stack, stack)[0].unflatten(0, (samples, locations))  # B, L, K, D
        x = (x + self.positions[:, None]).transpose(1, 2).flatten(1, 2)  # B, K*L, D: queries outermost, as published
        x = x + self.lead(lead_hours[:, None] / 100)[:, None]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        x = x.unflatten(1, (config.aggregation_queries, locations)).transpose(1, 2).flatten(2)
        return self._fields(self.output(x))

    def _fields(self, x: Tensor) -> Tensor:
        config, patch = self.config, self.config.patch_size
        rows, columns = config.n_lat // patch, config.n_lon // patch
        x = x.reshape(len(x), rows, columns, patch, patch, len(config.variables))
        fields = torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), -1, config.n_lat, config.n_lon)
        return fields[:, [config.variables.index(name) for name in config.output_names]]


_NAMES = {
    "variables": "var_embed",
    "queries": "var_query",
    "aggregation": "var_agg",
    "positions": "pos_embed",
    "lead": "lead_time_embed",
    "blocks": "blocks",
    "norm": "norm",
    "attention.in_proj_": "attn.qkv.",
    "attention.out_proj": "attn.proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
"""Names in `src/climax/arch.py` (and of timm's blocks in it) by those here, where they differ by more than a number."""


def published_state(network: PublishedClimaX, prefix: str = "net.") -> dict[str, Tensor]:
    """The state dict as `src/climax/arch.py` has it, under a prefix as of Lightning's modules; for one query a location."""
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        first, _, rest = name.partition(".")
        if first == "embeds":
            number, _, kind = rest.partition(".")
            own = f"token_embeds.{number}.proj.{kind}"
        elif first == "layers":
            number, _, kind = rest.partition(".")
            own = f"head.{2 * int(number)}.{kind}"
        elif first == "output":
            own = f"head.{2 * network.config.decoder_depth}.{rest}"
        elif first == "blocks":
            number, _, inner = rest.partition(".")
            for ours, theirs in _NAMES.items():
                inner = inner.replace(ours, theirs) if inner.startswith(ours) and ours != "norm" else inner
            own = f"blocks.{number}.{inner}"
        else:
            own = ".".join(filter(None, (_NAMES[first], rest)))
        state[prefix + own] = tensor[None] if first in ("variables", "queries", "positions") else tensor
    state[prefix + "var_query"] = state[prefix + "var_query"].reshape(1, 1, -1)
    return {name: tensor.clone().contiguous() for name, tensor in state.items()}


def published_loss(predicted: Tensor, targets: Tensor, latitudes: list[float]) -> Tensor:
    """ClimaX's `lat_weighted_mse`: the mean over everything, with cosine weights of mean 1."""
    cosines = torch.tensor([math.cos(math.radians(lat)) for lat in latitudes], dtype=predicted.dtype)
    return ((predicted - targets) ** 2 * (cosines / cosines.mean())[:, None]).mean()


def published_copy(model: Forecaster) -> PublishedClimaX:
    """The published form with the weights of `model`, in float64."""
    config = model.config
    copy = PublishedClimaX(config).double()
    values = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    width, heads = config.d_model, config.n_heads
    loaded = {
        "variables": values["embedding.variables"],
        "queries": values["embedding.aggregation.queries"],
        "positions": values["embedding.positions"],
        "lead.weight": values["embedding.lead.weight"],
        "lead.bias": values["embedding.lead.bias"],
        "norm.weight": values["head.norm.weight"],
        "norm.bias": values["head.norm.bias"],
    }
    for number, (weight, bias) in enumerate(
        zip(values["embedding.patches.weight"], values["embedding.patches.bias"], strict=True)
    ):
        loaded[f"embeds.{number}.weight"] = weight.reshape(width, 1, config.patch_size, config.patch_size)
        loaded[f"embeds.{number}.bias"] = bias
    part = {name.removeprefix("embedding.aggregation."): value for name, value in values.items()}
    loaded["aggregation.in_proj_weight"] = torch.cat([part[f"{name}.weight"] for name in ("query", "key", "value")])
    # The key's bias is arbitrary: it must not matter.
    loaded["aggregation.in_proj_bias"] = torch.cat((part["query.bias"], 3.0 * part["value.bias"], part["value.bias"]))
    loaded["aggregation.out_proj.weight"], loaded["aggregation.out_proj.bias"] = (
        part["output.weight"],
        part["output.bias"],
    )
    for number in range(config.n_layers):
        loaded |= _block(values, number, heads, width // heads)
    for number in range(config.decoder_depth):
        for kind in ("weight", "bias"):
            loaded[f"layers.{number}.{kind}"] = values[f"head.layers.{number}.{kind}"]
    points = config.patch_size**2
    for kind in ("weight", "bias"):
        by_variable = values[f"head.output.{kind}"].unflatten(0, (len(config.variables), points))
        loaded[f"output.{kind}"] = by_variable.transpose(0, 1).flatten(0, 1)
    copy.load_state_dict(loaded)
    return copy


def _block(values: dict[str, Tensor], number: int, heads: int, size: int) -> dict[str, Tensor]:
    mine, theirs = f"blocks.{number}", f"blocks.{number}"
    loaded: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        by_head = values[f"{mine}.attention.qkv.{kind}"].unflatten(0, (heads, 3, size))
        loaded[f"{theirs}.attention.in_proj_{kind}"] = by_head.transpose(0, 1).flatten(0, 2)
        loaded[f"{theirs}.attention.out_proj.{kind}"] = values[f"{mine}.attention.output.{kind}"]
        loaded[f"{theirs}.norm1.{kind}"] = values[f"{mine}.attention_norm.{kind}"]
        loaded[f"{theirs}.norm2.{kind}"] = values[f"{mine}.mlp_norm.{kind}"]
        loaded[f"{theirs}.up.{kind}"] = values[f"{mine}.mlp.up.{kind}"]
        loaded[f"{theirs}.down.{kind}"] = values[f"{mine}.mlp.down.{kind}"]
    return loaded
