"""Run files that are written from five answers: sound for every preset, commented by the schema, made for the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.config.families import find_family, sizes_of
from phalanx.config.fields import all_fields
from phalanx.config.load import parse_run
from phalanx.config.presets import load_preset, preset_names
from phalanx.config.starting_run import (
    SHARE_OF_PEAK,
    Answers,
    StartingRun,
    find_start,
    read_data,
    read_devices,
    read_goal,
    read_size,
    starting_families,
    write_starting_run,
)
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import described_names, load_machine


def _start(size: str, devices: str = "1", goal: str = "train", data: str | None = None) -> StartingRun:
    chosen = read_devices(devices)
    family = load_preset(size).family if size in preset_names() else "language"
    answers = Answers(
        family,
        find_start(family)["data"] if data is None else read_data(data),
        chosen,
        read_goal(goal),
        read_size(size, family, chosen),
    )
    return write_starting_run(answers, Path("my run.yaml"))


@pytest.mark.parametrize("size", preset_names())
def test_every_preset_gives_a_sound_file_whose_comments_are_the_schema_s(size: str) -> None:
    text = _start(size, "frontier:24").text
    run = parse_run(text, "my run.yaml")
    assert run.model.preset == size and run.cluster.devices_per_node == 8
    _, *sections = text.split("\n\n")
    known = all_fields(find_family(run.model.family).run)
    stated = 0
    for section in sections:
        name = next(line for line in section.splitlines() if not line.startswith("#")).removesuffix(":")
        comment: list[str] = []
        for line in section.splitlines():
            if line.startswith("  # "):
                comment.append(line.removeprefix("  # "))
            elif line.startswith("  ") and line[2] not in " -}]":
                field = known[f"{name}.{line.strip().partition(':')[0]}"]
                assert " ".join(comment).startswith(field.description), field.name
                stated, comment = stated + 1, []
    assert stated == sum(len(section) for section in yaml.safe_load(text).values())


@pytest.mark.parametrize(("goal", "batch"), [("try", 21), ("train", 70)])
def test_every_device_has_a_sample(goal: str, batch: int) -> None:
    run = parse_run(_start("nano-30m", "7", goal).text, "my run.yaml")
    assert isinstance(run, LanguageRun)
    stated = run.layout.global_batch
    samples = stated if isinstance(stated, int) else int(stated.split()[0]) // run.data.sequence_length
    assert samples == batch


def test_a_model_to_use_sees_twenty_tokens_a_parameter() -> None:
    run = parse_run(_start("mpt-125m", "8").text, "my run.yaml")
    count = sizes_of(run.model).parameter_count(run.model)
    assert run.layout.global_batch == "524288 tokens" and run.optimizer.lr == 6e-4
    assert run.training.steps * 524_288 == pytest.approx(20 * count, rel=1e-3)
    tried = parse_run(_start("mpt-125m", "8", "try").text, "my run.yaml")
    assert (tried.training.steps, tried.optimizer.lr, tried.layout.global_batch) == (300, 6e-4, 16)


GPT3 = {
    125e6: (0.5e6, 6.0e-4),
    350e6: (0.5e6, 3.0e-4),
    760e6: (0.5e6, 2.5e-4),
    1.3e9: (1e6, 2.0e-4),
    2.7e9: (1e6, 1.6e-4),
    6.7e9: (2e6, 1.2e-4),
    13e9: (2e6, 1.0e-4),
    175e9: (3.2e6, 0.6e-4),
}
"""Brown et al. 2020 (arXiv:2005.14165), table 2.1: parameters, tokens of a batch and learning rate for so many."""


def test_rates_and_batches_are_those_of_gpt_3() -> None:
    rows = find_start("language")["by_size"]
    for parameters, (tokens, rate) in GPT3.items():
        row = [row for row in rows if row["parameters"] <= parameters][-1]
        assert row["lr"] == rate
        # in powers of two, of which the nearest is less than a factor of 1.5 away
        assert row["tokens"].bit_count() == 1 and tokens / 1.5 < row["tokens"] < tokens * 1.5
    assert len([row for row in rows if row["parameters"] >= 100e6]) == len(GPT3)


@pytest.mark.parametrize("cluster", described_names())
def test_a_time_is_filled_by_the_largest_model_that_it_suffices_for(cluster: str) -> None:
    run = parse_run(_start("12h", f"{cluster}:4").text, "my run.yaml")
    flops = 4 * device_facts(load_machine(cluster).node.device).peak_tflops["bf16"] * 1e12 * SHARE_OF_PEAK * 43_200
    assert isinstance(run.layout.global_batch, str) and run.model.preset is not None
    count = sizes_of(run.model).parameter_count(run.model)
    tokens = run.training.steps * int(run.layout.global_batch.split()[0])
    assert 6 * count * tokens == pytest.approx(flops, rel=0.01)
    known = find_start("language")["deadline_presets"]
    larger = load_preset(known[known.index(run.model.preset) + 1]).model()
    assert 120 * count**2 <= flops < 120 * sizes_of(larger).parameter_count(larger) ** 2


def test_the_cpu_computes_in_single_precision() -> None:
    for size in ("nano-10m", "climax-small", "gnn-painn-600k"):
        run = parse_run(_start(size, "cpu", "try").text, "my run.yaml")
        assert (run.cluster.device, run.layout.precision) == ("cpu", "fp32")


def test_the_next_commands_are_those_that_this_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _start("nano-10m").commands == (
        "phalanx data sample text --out data/text",
        "phalanx config check 'my run.yaml'",
        "phalanx train 'my run.yaml'",
    )
    assert _start("nano-10m", "frontier:12", data="own text").commands == (
        "phalanx data prepare TEXT --out 'own text'",
        "phalanx config check 'my run.yaml' --devices 12",
        "phalanx plan 'my run.yaml' --cluster frontier --devices 12",
        "phalanx launch 'my run.yaml' --cluster frontier --nodes 2 --submit",
    )
    (tmp_path / "data" / "text").mkdir(parents=True)
    assert _start("nano-10m", "2").commands[-1] == "phalanx train 'my run.yaml' --nproc 2"
    assert _start("nano-10m").commands == _start("nano-10m", data="s3://own/text").commands
    assert _start("nano-10m", data="s3://own/text").remark is None
    own = _start("gnn-painn-600k", data="own.npz")
    assert own.commands[0] == "phalanx data prepare-graphs 'my run.yaml'"
    assert own.remark is not None and own.remark.startswith("labels and their units are those of the sample")
    assert _start("gnn-painn-600k").remark is None
    assert "  - path: own.npz\n" in own.text.replace("  - name: structures\n    path", "  - path")


REFUSED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "family": (
        find_start,
        ("wether",),
        "--family wether must be language, materials or weather\nnearest: weather",
    ),
    "no data": (read_data, (" ",), "--data is empty; give the path or address of the training data"),
    "two lines": (
        read_data,
        ("a\nb",),
        r"--data 'a\nb' holds characters that cannot be printed; give another path",
    ),
    "devices": (
        read_devices,
        ("gpu",),
        "--devices gpu must be cpu, a number of devices of this machine, or CLUSTER:NUMBER as in frontier:64",
    ),
    "no devices": (
        read_devices,
        ("frontier:0",),
        "--devices frontier:0 must be cpu, a number of devices of this machine, or CLUSTER:NUMBER as in frontier:64",
    ),
    "goal": (
        read_goal,
        ("win",),
        "--goal win must be try (see in minutes that everything works) or train (a model to use)",
    ),
    "size": (
        read_size,
        ("nano-10", "language", read_devices("1")),
        "--size nano-10 must be a preset of language models (phalanx config list shows them), or hours as in 12h\n"
        "nearest: nano-10m",
    ),
    "another family": (
        read_size,
        ("climax-small", "materials", read_devices("1")),
        "--size climax-small must be a preset of materials models (phalanx config list shows them), or hours as in 12h",
    ),
    "hours here": (
        read_size,
        ("6h", "language", read_devices("8")),
        "--size 6h: the speed of 8 devices of this machine is not known; give a preset, or --devices CLUSTER:NUMBER",
    ),
    "hours of weather": (
        read_size,
        ("6h", "weather", read_devices("frontier:8")),
        "--size 6h: how long weather models train is not known before; give a preset",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_answers_are_refused_with_what_is_right(name: str) -> None:
    read, arguments, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    assert str(caught.value) == message


def test_a_cluster_that_is_not_known_or_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--cluster frontir is not known.*\nnearest: frontier"):
        read_devices("frontir:8")
    with pytest.raises(ConfigError, match="200,000 devices are more than frontier has"):
        read_devices("frontier:200000")


def test_families_of_ours_can_all_be_begun() -> None:
    assert starting_families() == ["language", "materials", "weather"]
