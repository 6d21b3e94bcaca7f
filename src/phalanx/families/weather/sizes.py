"""Sizes of a forecaster and floating-point operations of a sample, in closed form from its description alone.

Exact for `phalanx.families.weather.model.forecaster`; a test compares the two. Needs no torch.
"""

from __future__ import annotations

from typing import Literal

from phalanx.families.weather.config import WeatherModel

FlopsConvention = Literal["needed", "published"]
FEATURES = 32
"""Wavelengths of a Fourier expansion, each of which gives a sine and a cosine."""


def parameter_count(model: WeatherModel) -> int:
    """Return the number of trainable parameters."""
    return embedding_parameters(model) + model.n_layers * block_parameters(model) + head_parameters(model)


def matmul_parameters(model: WeatherModel) -> int:
    """Return the number of parameters that multiply every token: those of the matrices of blocks and head."""
    width = model.d_model
    head = model.decoder_depth * width**2 + model.aggregation_queries * width * _pixels_of_a_patch(model)
    return model.n_layers * _block_matrix_parameters(model) + head


def in_words(model: WeatherModel) -> str:
    """Describe the shape of the model for a person."""
    inputs = f"{len(model.input_names)} variables" + (f" of {model.history} states" if model.history > 1 else "")
    return (
        f"{model.n_layers} layers x {model.d_model}, {model.n_heads} heads, {inputs} in and "
        f"{len(model.output_names)} out, grid {_grids_in_words(model)} in patches of {model.patch_size}"
        + (f", {model.members} members" if model.members > 1 else "")
    )


def _grids_in_words(model: WeatherModel) -> str:
    others = [f"{grid.n_lat} x {grid.n_lon}" for grid in model.grids]
    return ", ".join([f"{model.n_lat} x {model.n_lon}", *others])


def embedding_parameters(model: WeatherModel) -> int:
    """Return the number of parameters before the first block."""
    width, variables, points = model.d_model, len(model.variables), model.history * model.patch_size**2
    # Weight and bias of the patch embedding, and the embedding of the variable itself.
    per_variable = width * (points + 2)
    level = 2 * FEATURES * width if model.level_embedding == "fourier" else 0
    # Three coordinates and the area of a patch are expanded, then projected with a bias.
    learned = model.position_embedding == "learned"
    place = model.n_locations * width if learned else (8 * FEATURES + 1) * width
    lead = ((2 * FEATURES if model.lead_embedding == "fourier" else 1) + 1) * width
    # Query, key, value and output; the key has no bias.
    attention = 4 * width * width + 3 * width
    aggregation = attention + model.aggregation_queries * width
    if model.aggregation == "hierarchical":
        aggregation += attention + model.aggregation_groups * width
    return variables * per_variable + level + aggregation + place + lead


def block_parameters(model: WeatherModel) -> int:
    """Return the number of parameters of one block."""
    width = model.d_model
    biases = 3 * width + width + model.ff_size + width
    norms = 4 * width + (2 * model.head_size if model.qk_norm else 0)
    return _block_matrix_parameters(model) + biases + norms


def head_parameters(model: WeatherModel) -> int:
    """Return the number of parameters behind the last block."""
    width, outputs = model.d_model, _pixels_of_a_patch(model)
    layers = model.decoder_depth * (width * width + width)
    return 2 * width + layers + (model.aggregation_queries * width + 1) * outputs


def model_flops_per_sample(model: WeatherModel, convention: FlopsConvention = "needed") -> int:
    """Return the floating-point operations of one sample in a training step, forward and backward, without recomputation.

    Six per parameter and token of each matrix product (a multiply and an add forward, twice that backward), and attention
    in full, 12 * d_model * tokens^2 a block. For the aggregation of variables `needed` counts the products that depend on
    the sample when its weights are multiplied first (see `families.weather.model.field_embedding`), `published` those of
    a key and a value for every variable at every location, as ClimaX and ORBIT compute it and count it in their figures.
    """
    return (
        embedding_flops_per_sample(model, convention)
        + model.n_layers * block_flops_per_sample(model)
        + head_flops_per_sample(model)
    )


def roll_out_flops_per_sample(model: WeatherModel, steps: int, *, trained: bool) -> int:
    """Return the floating-point operations of one sample in a training step whose roll-out takes `steps` steps of the model.

    trained: whether all steps are trained through; else the last one is, and those before it go forward alone, which is a
    third of a step. What is computed a second time is not counted. The first step embeds a sample once for all members,
    later ones every member's own fields.
    """
    first = model_flops_per_sample(model)
    following = first + (model.members - 1) * embedding_flops_per_sample(model)
    each = [first, *[following] * (steps - 1)]
    return sum(each) if trained else sum(each[:-1]) // 3 + each[-1]


def block_flops_per_sample(model: WeatherModel) -> int:
    """Return the share of one block in `model_flops_per_sample`, of all members."""
    tokens = model.n_tokens
    of_row = 6 * tokens * _block_matrix_parameters(model) + 12 * model.d_model * tokens * tokens
    return model.members * of_row


def head_flops_per_sample(model: WeatherModel) -> int:
    """Return the share of the head in `model_flops_per_sample`, of all members."""
    width = model.d_model
    # The rows of the projection that belong to variables which are not predicted are not computed.
    outputs = len(model.output_names) * model.patch_size**2
    per_location = model.aggregation_queries * (model.decoder_depth * width * width + width * outputs)
    return 6 * model.members * model.n_locations * per_location


def embedding_flops_per_sample(model: WeatherModel, convention: FlopsConvention = "needed") -> int:
    """Return the share of patch embedding and aggregation in `model_flops_per_sample`, computed once for all members."""
    inputs = len(model.input_names)
    if model.aggregation == "flat":
        per_location = _aggregation_flops(model, inputs, model.aggregation_queries, convention)
    else:
        sizes = group_sizes(inputs, model.aggregation_groups)
        groups = sum(_aggregation_flops(model, size, 1, convention) for size in sizes)
        width, tokens, queries = model.d_model, model.aggregation_groups, model.aggregation_queries
        scores = tokens * queries * model.n_heads * width
        per_location = groups + scores + tokens * width * width + queries * tokens * width + queries * width * width
    return 6 * model.n_locations * per_location


def _aggregation_flops(model: WeatherModel, inputs: int, queries: int, convention: FlopsConvention) -> int:
    """Return the multiplications of one location from patches to `queries` tokens, forward."""
    width, points = model.d_model, model.history * model.patch_size**2
    projected = queries * width * width
    if convention == "needed":
        scores = inputs * (points + 1) * queries * model.n_heads
        return scores + queries * inputs * (points + 1) * width + projected
    keys_and_values = inputs * (width * points + 2 * width * width)
    return keys_and_values + 2 * projected + 2 * queries * inputs * width


def _block_matrix_parameters(model: WeatherModel) -> int:
    # Query, key, value and output of attention; up and down of the MLP; scale and shift of two norms by the noise.
    noise = 4 * model.d_model * model.noise_channels
    return 4 * model.d_model * model.d_model + 2 * model.d_model * model.ff_size + noise


def _pixels_of_a_patch(model: WeatherModel) -> int:
    """Return the numbers that the head has rows for at one location: all points of every variable that the model knows."""
    return len(model.variables) * model.patch_size**2


def group_sizes(variables: int, groups: int) -> list[int]:
    """Return the number of consecutive variables of each group; the first groups have one more where it does not divide."""
    each, more = divmod(variables, groups)
    return [each + (group < more) for group in range(groups)]
