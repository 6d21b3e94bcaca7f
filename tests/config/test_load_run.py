"""Layers of a run: defaults, preset, file, overrides; and the way back to a file."""

from pathlib import Path

import pytest
import yaml

from config.run_text import RUN
from phalanx.config.load import dump_run, load_run, parse_run
from phalanx.config.presets import load_preset, preset_names
from phalanx.families.language.config import DataSource, LanguageRun
from phalanx.families.materials.model_config import MaterialsModel
from phalanx.families.weather.config import WeatherModel


def parse(*overrides: str, text: str = RUN) -> LanguageRun:
    return parse_run(text, "run.yaml", overrides)


def test_layers() -> None:
    run = parse("training.seed=7", "training.seed=8", "model.tied_head=true")
    assert (run.model.preset, run.model.n_layers, run.model.d_ff) == ("llama3-8b", 4, 14336)
    assert run.model.tied_head and run.training.seed == 8 and run.optimizer.betas == (0.9, 0.95)
    assert run.optimizer.lr == 3e-4
    assert run.data.sources == [DataSource(path="data/a"), DataSource(path="data/b", weight=2.0)]


def test_fields_of_the_layout_need_no_section() -> None:
    run = parse("tp=2", "layout.tp=4", "microbatch=2", "layout.microbatch=3", "microbatch=1", "zero=1")
    assert (run.layout.tp, run.layout.microbatch, run.layout.zero) == (4, 1, 1)


def test_override_values_are_yaml() -> None:
    run = parse(
        "data.sources=[{path: c}]",
        "training.profile={first: 3, last: 5}",
        "training.memory_snapshot.first=2",
        "training.memory_snapshot.last=2",
        "optimizer.betas=[0.8, 0]",
        "optimizer.grad_clip=null",
        "optimizer.no_decay=[]",
        "optimizer.lr=1",
        "checkpoint={every: 10}",
    )
    assert run.data.sources == [DataSource(path="c")]
    assert run.training.profile is not None and run.training.profile.last == 5
    assert run.training.memory_snapshot is not None and run.training.memory_snapshot.first == 2
    assert run.optimizer.betas == (0.8, 0.0) and run.optimizer.grad_clip is None and run.optimizer.no_decay == ()
    assert run.optimizer.lr == 1.0 and type(run.optimizer.lr) is float
    assert run.checkpoint.every == 10


def test_items_of_a_list_can_be_overridden() -> None:
    assert parse("data.sources.1.weight=0.5").data.sources[1] == DataSource(path="data/b", weight=0.5)


@pytest.mark.parametrize(
    ("written", "prompt"),
    [
        ("Once: upon a time", "Once: upon a time"),
        ("true", "true"),
        ("3e-4", "3e-4"),
        ("[x", "[x"),
        ("a=b", "a=b"),
        ("'quoted: text'", "quoted: text"),
        ('"line\\nbreak"', "line\nbreak"),
        ("null", None),
    ],
)
def test_text_fields_take_text_as_it_is(written: str, prompt: str | None) -> None:
    assert parse(f"evaluation.prompt={written}").evaluation.prompt == prompt


def test_preset_switched_on_the_command_line_keeps_what_was_chosen() -> None:
    raw = parse("model.preset=mpt-125m")
    assert (raw.model.n_layers, raw.model.d_model, raw.model.n_kv_heads) == (4, 768, None)
    assert raw.model.positions == "alibi" and raw.model.norm == "layernorm" and raw.model.vocab_size == 50368
    resolved = parse("model.preset=mpt-125m", text=dump_run(parse()))
    assert resolved == raw
    assert parse("model.preset=llama3-8b") == parse()


def test_preset_fills_nested_fields_and_null_is_a_value() -> None:
    scaled = parse("model.preset=llama3.1-8b", "model.rope_scaling.factor=32")
    assert scaled.model.rope_scaling is not None
    assert (scaled.model.rope_scaling.factor, scaled.model.rope_scaling.high_freq_factor) == (32.0, 4.0)
    assert parse("model.preset=llama3.1-8b", "model.rope_scaling=null").model.rope_scaling is None
    assert parse("model.n_kv_heads=null").model.kv_heads == 32


def test_empty_sections_mean_defaults() -> None:
    assert parse(text=RUN + "evaluation:\n  # every: 10\ncheckpoint:\n") == parse()


def test_global_batch_in_samples_or_tokens() -> None:
    assert parse("layout.global_batch=256 samples").layout.global_batch == "256 samples"
    assert parse("layout.global_batch=524_288 tokens").layout.global_batch == "524_288 tokens"


def test_a_run_folder_stands_for_its_resolved_run_file(tmp_path: Path) -> None:
    run = parse("training.steps=7")
    (tmp_path / "run.yaml").write_text(dump_run(run))
    assert load_run(tmp_path) == run
    assert load_run(tmp_path, ["training.steps=9"]).training.steps == 9


DATA = {
    "language": {"sources": ["text"], "sequence_length": 512},
    "weather": {
        "sources": ["fields"],
        "inputs": ["z500"],
        "lead_hours": 72,
        "splits": {"train": {"first": "1979", "last": "2015"}},
    },
    "materials": {
        "sources": [{"name": "alloys", "path": "alloys.npz", "labels": {"energy": "eV", "forces": "eV/A"}}],
        "prepared": "graphs",
        "cutoff": 5.0,
    },
}


@pytest.mark.parametrize("preset", preset_names())
def test_dump_loads_back_to_an_equal_run(preset: str) -> None:
    tree = yaml.safe_load(RUN)
    model = load_preset(preset).model()
    tree |= {"model": {"preset": preset}, "data": dict(DATA[model.family])}
    if isinstance(model, WeatherModel):
        tree["data"] |= {"inputs": list(model.input_names), "outputs": list(model.output_names)}
    if isinstance(model, MaterialsModel):
        tree["data"]["cutoff"] = model.cutoff
    tree["layout"]["global_batch"] = 256
    run = parse("training.profile={first: 1, last: 2}", text=yaml.dump(tree))
    text = dump_run(run)
    assert parse_run(text, "dump") == run
    assert f"preset: {preset}" in text


LOOK_LIKE_OTHER_THINGS = ["3e-4", "no", "null", "", "524_288", "0o17", "- a", "a: b # c", "!x", "&a", "*a", "'", " x "]
UNUSUAL = ["line\nbreak\n", "\x1b\0\x85\ufeff", "é🎉"]


@pytest.mark.parametrize("prompt", [*LOOK_LIKE_OTHER_THINGS, *UNUSUAL])
def test_any_text_survives_the_dump(prompt: str) -> None:
    run = parse()
    run = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"prompt": prompt})})
    assert parse_run(dump_run(run), "dump") == run


def test_dump_is_a_whole_run_file_and_says_where_it_left_the_preset() -> None:
    text = dump_run(parse())
    assert "  n_layers: 4  # llama3-8b: 32\n" in text and text.count("#") == 1
    assert "  betas: [0.9, 0.95]\n" in text and "asynchronous: true" in text
