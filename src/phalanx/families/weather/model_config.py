"""The `model` section of a run file for the weather family: the shape of one Vision Transformer over fields on a grid.

Pure description, as in `config.model`. The defaults are ClimaX as published (Nguyen et al. 2023, arXiv:2301.10343);
whatever departs from it is an option that is off.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from phalanx.config.bounds import HiddenWidth, Layers, Width, first_repeated
from phalanx.config.model import BlockModel

Latitude = Annotated[float, Field(ge=-90.0, le=90.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


def _tuple_from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_tuple_from_list), Field(min_length=1)]
Numbers = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_tuple_from_list), Field(min_length=1)]


class WeatherModel(BlockModel):
    """One Vision Transformer over gridded fields. Presets (`model.preset`) fill every field but a few."""

    family: Literal["weather"] = "weather"
    """Model family."""
    n_layers: Layers
    """Transformer blocks."""
    d_model: Width
    """Width of a token."""
    n_heads: Width
    """Attention heads, of the blocks and of the variable aggregation."""
    d_ff: HiddenWidth | None = None
    """Hidden width of the MLP; null means 4 * d_model."""
    n_lat: Width
    """Rows of the grid."""
    n_lon: Width
    """Columns of the grid."""
    patch_size: Width
    """Edge of a square patch in grid points; it divides n_lat and n_lon."""
    first_latitude: Latitude | None = None
    """Latitude of the first row's points in degrees; null, with last_latitude, is a grid whose cells span the globe."""
    last_latitude: Latitude | None = None
    """Latitude of the last row's points in degrees."""
    variables: Names
    """Variables the model has parameters for; pressure levels as in temperature_850 (hPa)."""
    inputs: Names | None = None
    """Variables it reads, in the order of the fields; null means all."""
    outputs: Names | None = None
    """Variables it predicts, in the order of the targets; null means all."""
    aggregation: Literal["flat", "hierarchical"] = "flat"
    """How a location's variables become tokens: one attention over all of them, or one over groups and one over those."""
    aggregation_groups: Width = 1
    """Groups of consecutive inputs that hierarchical aggregation first makes one token each."""
    aggregation_queries: Width = 1
    """Tokens a location keeps after aggregation."""
    decoder_depth: Annotated[int, Field(ge=0, le=10_000)] = 2
    """Hidden layers of the head."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before the product."""
    norm_eps: PositiveFloat = 1e-5
    """Term under the square root of the normalisation."""
    position_embedding: Literal["learned", "fourier"] = "learned"
    """A learned table for one grid, or features of each patch's place and area on the sphere."""
    lead_embedding: Literal["linear", "fourier"] = "linear"
    """Lead time as one number (hours / 100), or as waves of many lengths."""
    level_embedding: Literal["none", "fourier"] = "none"
    """Whether tokens of pressure-level variables also carry waves of the pressure."""
    prediction: Literal["state", "change"] = "state"
    """What the head gives: the fields themselves, or their change since the inputs (then outputs are among inputs)."""
    change_scales: Numbers | None = None
    """Size of a typical change of each output, in the units of the (normalised) fields; null means 1."""
    latitude_weights: Literal["cos", "area"] = "cos"
    """Weights of the loss: cosine of the latitude, or exact areas of the cells."""
    loss_weights: Numbers | None = None
    """Weight of each output in the loss; null means 1."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the embedding and on both residual branches."""
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Chance that a sample skips a residual branch of the last block; it grows linearly from 0 in the first."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _shape_fits(self) -> WeatherModel:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}; change one")
        if self.n_lat % self.patch_size or self.n_lon % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} does not divide n_lat={self.n_lat} and n_lon={self.n_lon}; both must be "
                "multiples of it"
            )
        if self.position_embedding == "learned" and self.d_model % 4:
            raise ValueError(
                f"learned positions start from waves and need a multiple of 4 as d_model, not {self.d_model}"
            )
        if self.d_model % 2:
            raise ValueError(f"variable embeddings start from waves and need an even d_model, not {self.d_model}")
        return self

    @model_validator(mode="after")
    def _latitudes_fit(self) -> WeatherModel:
        if (self.first_latitude is None) != (self.last_latitude is None):
            raise ValueError("give both first_latitude and last_latitude, or neither")
        if self.first_latitude is not None and self.first_latitude == self.last_latitude:
            raise ValueError(f"first_latitude and last_latitude are both {self.first_latitude}; rows must differ")
        if self.first_latitude is not None and self.n_lat == 1:
            raise ValueError("n_lat=1 leaves the height of a row unknown; leave out first_latitude and last_latitude")
        if self.position_embedding == "fourier" and not self._spans_the_globe():
            raise ValueError(
                f"position_embedding=fourier places patches on the whole globe, and rows from {self.first_latitude} to "
                f"{self.last_latitude} degrees do not span it; use learned"
            )
        return self

    def _spans_the_globe(self) -> bool:
        if self.first_latitude is None or self.last_latitude is None:
            return True
        half = abs(self.last_latitude - self.first_latitude) / (self.n_lat - 1) / 2
        ends = sorted((self.first_latitude, self.last_latitude))
        return ends[0] - half <= -89.999 and ends[1] + half >= 89.999

    @model_validator(mode="after")
    def _variables_fit(self) -> WeatherModel:
        _no_repeats("variables", self.variables)
        for field, names in (("inputs", self.input_names), ("outputs", self.output_names)):
            _no_repeats(field, names)
            _all_among(field, names, "variables", self.variables)
        if self.prediction == "change":
            _all_among(
                "outputs", self.output_names, "inputs", self.input_names, " (prediction=change adds to the inputs)"
            )
        for field, numbers in (("change_scales", self.change_scales), ("loss_weights", self.loss_weights)):
            if numbers is not None and len(numbers) != len(self.output_names):
                raise ValueError(
                    f"{field} has {len(numbers)} numbers for {len(self.output_names)} outputs; give one each"
                )
        if self.prediction == "state" and self.change_scales is not None:
            raise ValueError("change_scales has no effect with prediction=state; set it to null")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> WeatherModel:
        if self.aggregation == "flat" and self.aggregation_groups > 1:
            raise ValueError(
                f"aggregation_groups={self.aggregation_groups} has no effect with aggregation=flat; use hierarchical"
            )
        if self.aggregation_groups > len(self.input_names):
            raise ValueError(
                f"aggregation_groups={self.aggregation_groups} is more than the {len(self.input_names)} inputs; "
                "each group needs one"
            )
        return self

    @property
    def ff_size(self) -> int:
        """Hidden width of the MLP, the default resolved."""
        return self.d_ff or 4 * self.d_model

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads

    @property
    def input_names(self) -> tuple[str, ...]:
        """Variables read, the default resolved."""
        return self.inputs or self.variables

    @property
    def output_names(self) -> tuple[str, ...]:
        """Variables predicted, the default resolved."""
        return self.outputs or self.variables

    @property
    def n_locations(self) -> int:
        """Patches of the grid."""
        return (self.n_lat // self.patch_size) * (self.n_lon // self.patch_size)

    @property
    def n_tokens(self) -> int:
        """Tokens of a sample between blocks: `aggregation_queries` a patch."""
        return self.n_locations * self.aggregation_queries

    @property
    def random_drops(self) -> bool:
        """Whether a training step leaves anything out at random."""
        return self.dropout > 0.0 or self.drop_path > 0.0


def _no_repeats(field: str, names: tuple[str, ...]) -> None:
    repeated = first_repeated(names)
    if repeated is not None:
        raise ValueError(f"{field} names {repeated} more than once; name each variable once")


def _all_among(field: str, names: tuple[str, ...], other: str, known: tuple[str, ...], why: str = "") -> None:
    there = frozenset(known)
    unknown = next((name for name in names if name not in there), None)
    if unknown is not None:
        raise ValueError(f"{field} names {unknown}, which is not among {other}{why}; add it there or leave it out")
