"""Presets: every published size, and the real module's size, to the parameter; those of other packages."""

from pathlib import Path

import pytest
import torch

from phalanx.config.check import batch_sizes
from phalanx.config.families import FAMILIES, Family, sizes_of
from phalanx.config.load import load_run, parse_run
from phalanx.config.model import LanguageModel
from phalanx.config.presets import PublishedCount, load_preset, preset_names, recipe_names
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.sizes import active_parameter_count, embedding_parameters, parameter_count

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
    # Half of total_size, the bytes in bfloat16, in the index of the weights.
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}

ACTIVE = {
    "mixtral-8x7b": ("12.9B", True),
    "qwen3-30b-a3b": ("3B", True),
    "qwen3-235b-a22b": ("22B", True),
    "deepseek-v2-lite": ("2.4B", False),
    "deepseek-v3": ("37B", False),
}
"""Parameters that compute a token, as the publications named in the presets print them, and whether the table that tokens
are looked up in is among them."""

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


@pytest.mark.parametrize(("name", "published"), ACTIVE.items())
def test_published_count_of_parameters_that_compute_a_token(name: str, published: tuple[str, bool]) -> None:
    printed, with_table = published
    model = load_preset(name).model()
    assert isinstance(model, LanguageModel)
    least, most = PublishedCount(printed, "", {}).bounds()
    counted = active_parameter_count(model) - (0 if with_table else embedding_parameters(model))
    # 2,451 million are printed as 2.4 billion, 3,353 as 3: digits are cut off by some, rounded by others.
    assert least <= counted <= most + (most - least) / 2


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


PACKAGED = """
about: Two blocks.
source: nobody
sequence_length: 8
published: []
model:
  n_layers: 2
  d_model: 8
  n_heads: 2
  vocab_size: 16
  max_positions: 8
"""
TINY_RUN = """
model: {preset: tiny-2, n_layers: 3}
data: {sources: [text], sequence_length: 8}
layout: {global_batch: 1}
optimizer: {lr: 1.0e-3}
training: {steps: 1}
"""


def test_a_family_of_another_package_brings_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TinyModel(LanguageModel):
        family: str = "tiny"  # type: ignore[assignment]

    class TinyRun(LanguageRun):
        model: TinyModel

    (tmp_path / "tiny-2.yaml").write_text(PACKAGED)
    monkeypatch.setattr(FAMILIES, "_items", {})
    FAMILIES.register("tiny", Family("tiny", TinyRun, bound="nowhere:Nothing", presets=tmp_path))
    assert "tiny-2" in preset_names() and load_preset("tiny-2").family == "tiny"
    run = parse_run(TINY_RUN, "run.yaml")
    assert isinstance(run, TinyRun) and (run.model.family, run.model.n_layers, run.model.d_model) == ("tiny", 3, 8)


def test_a_name_is_no_path() -> None:
    with pytest.raises(ConfigError, match="no such preset"):
        load_preset("../presets/gpt2")


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_a_whole_run_on_about_20_tokens_a_parameter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = load_run(name, ["data.sources=[mine]"])
    assert isinstance(run, LanguageRun) and run.data_names == ["mine"]
    tokens = batch_sizes(run).samples_through(run.training.steps) * run.data.sequence_length
    assert 18 < tokens / sizes_of(run.model).parameter_count(run.model) < 22


def test_a_recipe_gives_way_to_a_file_and_is_proposed_for_a_name_like_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run file mpt-1c does not exist\nnearest: the recipe mpt-1b"):
        load_run("mpt-1c")
    Path("mpt-1b").write_text("model: {preset: nano-10m}\n")
    with pytest.raises(ConfigError, match="section data is missing"):
        load_run("mpt-1b")
