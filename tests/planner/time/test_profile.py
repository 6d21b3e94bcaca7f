"""Profiles: defaults from a device's facts, files, and what is refused in them."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from phalanx.errors import ConfigError
from phalanx.hardware.collectives import default_constants
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import load_machine
from phalanx.planner.time.profile import (
    CONSTANTS,
    NamedProfile,
    Profile,
    default_profile,
    load_profile,
    profile_beside,
    profile_for,
    save_profile,
    shipped_profiles,
    spread_of,
)
from phalanx.planner.time.timed_operations import TimedOperation


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
    known = {name for name in CONSTANTS if spread_of(name) == 0.0}
    # No published run says anything of what the host does for exchanges, of blocks of ours that are not compiled, of 64-bit
    # numbers, of attention of few rows alone, or of products of groups: none that can be used is of experts. That of 8 bits
    # is known from products alone.
    hosts = {"exchange_host_s", "shard_host_s"}
    assert known == {"grouped_share", "matmul64_flop_s", "matmul8_flop_s", "attention_area", "eager_share", *hosts}
    assert all(0.0 < spread_of(name) <= 1.0 for name in set(CONSTANTS) - known)


def test_wider_numbers_multiply_as_the_peaks_say_whatever_narrower_ones_do() -> None:
    # B200 doubles its rate for numbers of eight bits, which says nothing of those of 32.
    for device, single, double in (("H200", 67 / 989, 67 / 989), ("B200", 75 / 2250, 37 / 2250)):
        profile = default_profile(device).profile
        assert profile.matmul32_flop_s / profile.matmul_flop_s == pytest.approx(single, rel=2e-3)
        assert profile.matmul64_flop_s / profile.matmul_flop_s == pytest.approx(double, rel=2e-3)


def test_eight_bit_numbers_multiply_as_published_and_at_the_rate_of_sixteen_where_there_are_none(
    tmp_path: Path,
) -> None:
    for device, factor in (("H200", 1453.4 / 794.5), ("MI300X", 2614.9 / 1307.4), ("MI250X GCD", 1.0)):
        profile = default_profile(device).profile
        assert profile.matmul8_flop_s / profile.matmul_flop_s == pytest.approx(factor, rel=2e-3)
        save_profile(tmp_path / "mine.yaml", NamedProfile("mine", device, "measured", profile))
        lines = (tmp_path / "mine.yaml").read_text().splitlines(True)
        (tmp_path / "mine.yaml").write_text("".join(x for x in lines if "matmul8_flop_s" not in x))
        again = load_profile(str(tmp_path / "mine.yaml")).profile
        assert again.matmul8_flop_s == pytest.approx(profile.matmul8_flop_s)


def test_the_rate_of_64_bit_numbers_follows_that_of_32_where_a_file_lacks_it(tmp_path: Path) -> None:
    profile = replace(default_profile("MI250X GCD").profile, matmul32_flop_s=2e13)
    path = tmp_path / "mine.yaml"
    for device, factor in (("MI250X GCD", 1.0), ("something new", 0.5)):
        save_profile(path, NamedProfile("mine", device, "measured", profile))
        path.write_text("".join(x for x in path.read_text().splitlines(True) if "matmul64_flop_s" not in x))
        assert load_profile(str(path)).profile.matmul64_flop_s == pytest.approx(2e13 * factor)


def test_constants_that_came_later_may_be_missing_from_a_file(tmp_path: Path) -> None:
    profile = replace(default_profile("H200").profile, shard_host_s=5e-5)
    save_profile(tmp_path / "mine.yaml", NamedProfile("mine", "H200", "measured", profile))
    text = (tmp_path / "mine.yaml").read_text()
    whole = load_profile(str(tmp_path / "mine.yaml")).profile
    assert whole.shard_host_s == 5e-5
    (tmp_path / "mine.yaml").write_text("".join(x for x in text.splitlines(True) if "shard_host_s" not in x))
    later = load_profile(str(tmp_path / "mine.yaml")).profile
    assert later == replace(whole, shard_host_s=default_profile("H200").profile.shard_host_s)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = NamedProfile("mine", "H200", "measured", default_profile("H200").profile, {"rows": ["a"]})
    save_profile(tmp_path / "mine.yaml", saved)
    loaded = load_profile(str(tmp_path / "mine.yaml"))
    assert _constants(loaded.profile) == pytest.approx(_constants(saved.profile), rel=1e-4)
    assert (loaded.name, loaded.device, loaded.fitted) == ("mine", "H200", {"rows": ["a"]})
    assert loaded.collectives is None and loaded.beside is None and loaded.profile.measured == ()


def test_what_was_measured_comes_back_too(tmp_path: Path) -> None:
    operations = (
        TimedOperation("matmul", 1, 4096, 1024, 512, 2.5e-5, 1.25),
        TimedOperation("attention", 8, 64, 64, 128, 1e-4, 0.5),
    )
    collectives = default_constants(load_machine("frontier"))
    profile = replace(default_profile("MI250X GCD").profile, measured=operations)
    beside = {"context": 1.5e9, "communicator": 2e8}
    saved = NamedProfile("mine", "MI250X GCD", "measured", profile, None, collectives, beside)
    save_profile(tmp_path / "mine.yaml", saved)
    loaded = load_profile(str(tmp_path / "mine.yaml"))
    assert loaded.profile.measured == operations
    assert loaded.collectives == collectives and loaded.beside == beside


def test_between_nodes_stays_as_it_is_by_default_where_one_node_was_measured() -> None:
    machine = load_machine("frontier")
    default = default_constants(machine)
    inside = replace(default, launch_s=1e-6, step_across_s=0.0, efficiency_across=1.0, tree=1.0)
    named = replace(default_profile("MI250X GCD"), collectives=inside)
    assert named.collectives_on(machine) == replace(default, launch_s=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operations": [["matmul", 1, 2, 3]]}, r"operations\[0\]=.* is not \[kind, batch"),
        ({"operations": [["sort", 1, 2, 3, 4, 1.0, 1.0]]}, r"operations\[0\]"),
        ({"collectives": {"launch_s": 1.0}}, "collectives has to hold launch_s, step_s"),
        ({"beside": {"context": "much", "communicator": 1}}, "beside.context=much is not a number"),
    ],
)
def test_wrong_measurements_are_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "wrong.yaml"
    save_profile(path, NamedProfile("wrong", "H200", "", default_profile("H200").profile))
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(ConfigError, match=words):
        load_profile(str(path))


def test_a_profile_beside_the_description_or_here_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, own = load_machine("h200-x4"), tmp_path / "own"
    own.mkdir()
    monkeypatch.chdir(tmp_path)
    assert profile_beside(machine, "h200-x4") is None
    (tmp_path / "h200-x4.profile.yaml").touch()
    assert profile_beside(machine, "h200-x4") == Path("h200-x4.profile.yaml")
    (own / "h200-x4.profile.yaml").touch()
    assert profile_beside(machine, str(own / "mine.yaml")) == own / "h200-x4.profile.yaml"


def _constants(profile: Profile) -> dict[str, float]:
    return {name: getattr(profile, name) for name in CONSTANTS}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matmul_flop_s": None}, "lacks constants matmul_flop_s"),
        ({"speed": 1.0}, "has unknown constants speed"),
        ({"host_s": "fast"}, "constants.host_s=fast is not a number"),
        ({"host_s": -1.0}, "constants.host_s=-1.0 is not a number of zero or more"),
        ({"memory_b_s": 0}, "constants.memory_b_s=0 is not a number above zero"),
        ({"link_share": 0.0}, "constants.link_share=0.0 is not a number above zero"),
    ],
)
def test_wrong_constants_are_named(tmp_path: Path, change: dict[str, object], words: str) -> None:
    constants = _constants(default_profile("H200").profile) | change
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
