"""Presets: every published size, and the real module's size, to the parameter."""

import pytest
import torch

from phalanx.config.families import sizes_of
from phalanx.config.model import LanguageModel
from phalanx.config.presets import PublishedCount, load_preset, preset_names
from phalanx.families.language.model.decoder import Decoder
from phalanx.families.language.sizes import parameter_count

WANTED = [
    "gpt-1.4b",
    "gpt-22b",
    "gpt-175b",
    "gpt-1t",
    "gpt2",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "lumi-140b",
    "mpt-125m",
    "mpt-350m",
    "mpt-760m",
    "mpt-1b",
    "mpt-3b",
    "mpt-7b",
    "mpt-13b",
    "mpt-30b",
    "mpt-70b",
]

EXACT = {
    "gpt2": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}

SHAPES = {
    "gpt-1.4b": (24, 2112, 24),
    "gpt-22b": (48, 6144, 48),
    "gpt-175b": (96, 12288, 96),
    "gpt-1t": (128, 25600, 128),
}


def test_every_published_run_has_its_preset() -> None:
    assert set(WANTED) <= set(preset_names())


def test_families_stand_together_small_before_large() -> None:
    mpt = [name for name in preset_names() if name.startswith("mpt-")]
    assert mpt == [f"mpt-{size}" for size in ["125m", "350m", "760m", "1b", "3b", "7b", "13b", "30b", "70b"]]


LANGUAGE = [name for name in preset_names() if load_preset(name).family == "language"]


@pytest.mark.parametrize("name", preset_names())
def test_published_count_within_its_printed_digits(name: str) -> None:
    preset = load_preset(name)
    assert preset.about and preset.source and (preset.published or preset.family != "language")
    for printed in preset.published:
        least, most = printed.bounds()
        model = preset.model(**printed.variant)
        assert least <= sizes_of(model).parameter_count(model) <= most, (name, printed)


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_module_has_exactly_the_computed_parameters(name: str) -> None:
    model = load_preset(name).model()
    with torch.device("meta"):
        decoder = Decoder(model)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == parameter_count(model)


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_counts_of_released_checkpoints(name: str, count: int) -> None:
    assert parameter_count(load_preset(name).model()) == count


@pytest.mark.parametrize(("name", "shape"), SHAPES.items())
def test_shapes_of_the_frontier_study(name: str, shape: tuple[int, int, int]) -> None:
    model = load_preset(name).model()
    assert (model.n_layers, model.d_model, model.n_heads) == shape


@pytest.mark.parametrize(
    ("printed", "bounds"),
    [
        ("6.6589B", (6_658_850_000, 6_658_950_000)),
        ("124M", (123_500_000, 124_500_000)),
        ("1T", (5e11, 1.5e12)),
        ("10", (9.5, 10.5)),
    ],
)
def test_tolerance_is_half_of_the_last_printed_digit(printed: str, bounds: tuple[float, float]) -> None:
    assert PublishedCount(printed, "", {}).bounds() == bounds


@pytest.mark.parametrize("name", LANGUAGE)
def test_sequence_fits_the_model(name: str) -> None:
    preset = load_preset(name)
    model = preset.model()
    assert isinstance(model, LanguageModel) and preset.sequence_length <= model.max_positions
