"""Profiles: defaults from a device's facts, files, and what is refused in them."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from phalanx.cluster.device import device_facts
from phalanx.cluster.machine import load_machine
from phalanx.cost.profile import (
    CONSTANTS,
    NamedProfile,
    default_profile,
    load_profile,
    profile_for,
    save_profile,
    shipped_profiles,
    spread_of,
)
from phalanx.errors import ConfigError


@pytest.mark.parametrize("device", ["MI250X GCD", "MI300X", "A100-80GB", "H200", "B200", "V100"])
def test_a_default_keeps_below_the_device_s_facts(device: str) -> None:
    facts, profile = device_facts(device), default_profile(device).profile
    peak = max(facts.peak_tflops.get(name, 0.0) for name in ("bf16", "fp16"))
    assert 0.3 * peak < profile.matmul_flop_s / 1e12 < peak
    assert facts.bandwidth_gb_s is not None
    assert 0.5 < profile.memory_b_s / 1e9 / facts.bandwidth_gb_s < 1.0
    assert profile.matmul32_flop_s < profile.matmul_flop_s


def test_a_device_without_facts_has_none() -> None:
    with pytest.raises(ConfigError, match="CPU"):
        default_profile("CPU")


def test_every_constant_has_a_spread() -> None:
    assert all(0.0 < spread_of(name) <= 1.0 for name in CONSTANTS)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = NamedProfile("mine", "H200", "measured", default_profile("H200").profile, {"rows": ["a"]})
    save_profile(tmp_path / "mine.yaml", saved)
    loaded = load_profile(str(tmp_path / "mine.yaml"))
    assert asdict(loaded.profile) == pytest.approx(asdict(saved.profile), rel=1e-4)
    assert (loaded.name, loaded.device, loaded.fitted) == ("mine", "H200", {"rows": ["a"]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matmul_flop_s": None}, "lacks constants matmul_flop_s"),
        ({"speed": 1.0}, "has unknown constants speed"),
        ({"host_s": "fast"}, "constants.host_s=fast is not a number"),
        ({"host_s": -1.0}, "constants.host_s=-1.0 is not a number of zero or more"),
    ],
)
def test_wrong_constants_are_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    constants = asdict(default_profile("H200").profile) | change
    constants = {name: value for name, value in constants.items() if value is not None}
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump({"name": "wrong", "device": "H200", "constants": constants}))
    with pytest.raises(ConfigError, match=words):
        load_profile(str(path))


def test_an_unknown_name_says_which_are_known() -> None:
    with pytest.raises(ConfigError, match="selene"):
        load_profile("nowhere")


def test_a_machine_gets_its_own_profile_or_that_of_its_device() -> None:
    assert profile_for(load_machine("selene")).name == "selene"
    assert profile_for(load_machine("h200-x4")).name == "H200"


def test_shipped_profiles_say_which_rows_they_were_fitted_to() -> None:
    for name in shipped_profiles():
        fitted = load_profile(name).fitted
        assert fitted is not None and 1 <= len(fitted["rows"]) <= 20, name


def test_shares_stay_at_most_one() -> None:
    assert default_profile("H200").profile.scaled({"hidden": 2.0, "host_s": 2.0}).hidden == 1.0
