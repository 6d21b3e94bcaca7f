"""The table of fields that messages, the printed reference and the guide are made from."""

import re

import pytest

from phalanx.config.families import BUILT_IN, find_family
from phalanx.config.fields import all_fields, nearest_field, run_sections
from phalanx.families.language.config import LanguageRun


@pytest.mark.parametrize("family", BUILT_IN)
def test_every_field_is_described(family: str) -> None:
    for field in all_fields(find_family(family).run).values():
        assert field.description.endswith("."), field.name
        assert field.allowed, field.name
    for section in run_sections(find_family(family).run):
        assert section.description, section.name


def test_mappings_of_names_in_words() -> None:
    fields = all_fields(find_family("materials").run)
    assert fields["data.sources.N.labels"].default == "{}"
    assert fields["data.sources.N.labels"].allowed.startswith(
        "a mapping of energy, forces, stress, charges, dipole, total_charge and"
    )
    assert fields["data.sources.N.labels.NAME.factor"].default == "1.0"


def test_types_and_bounds_in_words() -> None:
    allowed = {name: field.allowed for name, field in all_fields(LanguageRun).items()}
    assert allowed["layout.microbatch"] == "a whole number from 1 to 1,000,000,000, or auto"
    assert allowed["layout.dp_shard"] == "a whole number from 1 to 10,000,000, or auto"
    assert allowed["data.prefetch"] == "a whole number from 0 to 64"
    assert allowed["model.dropout"] == "a number of at least 0 and less than 1"
    assert allowed["optimizer.no_decay"] == "a list, each norm, bias or embedding"
    assert allowed["training.compile"] == "true, false or auto"
    assert allowed["training.profile"] == "a mapping with first and last, or null"
    assert allowed["data.sources.N.weight"] == "a number of at least 0"
    assert allowed["model.init_std"] == "a number greater than 0"


@pytest.mark.parametrize("family", BUILT_IN)
def test_every_whole_number_has_an_upper_bound(family: str) -> None:
    bounded = re.compile(r"a whole number (from [-0-9,]+ to|of at least \d+ and less than) [0-9,]+")
    for field in all_fields(find_family(family).run).values():
        told_by_a_validator = ".values", ".low", ".high", "search.layout"
        if "a whole number" in field.allowed and not field.name.endswith(told_by_a_validator):
            assert field.name.endswith("global_batch") or bounded.search(field.allowed), (field.name, field.allowed)


def test_defaults_as_in_a_run_file() -> None:
    fields = all_fields(LanguageRun)
    assert fields["training.steps"].required and fields["training.steps"].default is None
    assert fields["optimizer.betas"].default == "[0.9, 0.95]"
    assert fields["training.profile"].default == "null"


def test_nearest_names() -> None:
    assert nearest_field("layout.microbach", LanguageRun) == "layout.microbatch"
    assert nearest_field("training.lr", LanguageRun) == "optimizer.lr"
    assert nearest_field("warmup_step", LanguageRun) == "optimizer.warmup_steps"
    assert nearest_field("steps", LanguageRun) == "training.steps"
    assert nearest_field("optimiser", LanguageRun) == "optimizer"
    assert nearest_field("data.sources.N.pth", LanguageRun) == "data.sources.N.path"
    assert nearest_field("layout.zzzz", LanguageRun) is None
