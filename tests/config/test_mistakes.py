"""What a person reads for each mistake in a run file or on the command line."""

from pathlib import Path

import pytest

from config.run_text import RUN
from phalanx.config.load import load_run, parse_run
from phalanx.errors import ConfigError

LAYOUT_HAS = (
    "dp_replicate, dp_shard, tp, cp, pp, ep, expert_tp, ep_chunks, ep_node, zero, schedule, stages_per_rank, context, "
    "tp_across_nodes, microbatch, global_batch, batch_warmup, recompute, precision, fp8_gradients, fp8_keep_ends, "
    "reshard_after_forward, gather, gather_blocks, gathers_ahead, offload_optimizer, offload_activations, branch_groups "
    "and peer_copies"
)
SECTIONS = (
    "model, data, layout, optimizer, training, checkpoint, evaluation, restart, safeguards, cluster, remote, search "
    "and tune"
)
PRESETS = "(phalanx config list shows them)"
SOURCES = "a list of at least one, each a path or a mapping with path and weight"
BETAS = "a list of 2, each a number of at least 0 and less than 1"
BATCH = 'a whole number of samples up to 1,000,000,000, or of tokens as in "524288 tokens"'
COUNT = "a whole number from 1 to 1,000,000,000,000"
SAMPLES = "a whole number from 1 to 1,000,000,000, or auto"

BY_OVERRIDE = {
    # unknown names
    "layout.microbach=2": "layout.microbach=2: there is no such field\nnearest: layout.microbatch",
    "training.lr=1": "training.lr=1: there is no such field\nnearest: optimizer.lr",
    "layout.zzzz=1": f"layout.zzzz=1: there is no such field; layout has {LAYOUT_HAS}",
    "optimiser.lr=3": "optimiser is not a section of a run file\nnearest: optimizer",
    "foo.bar=1": f"foo is not a section of a run file; it has {SECTIONS}",
    "tune.parameters={optimizer.lr: {low: 1, hgih: 2}}": "tune.parameters.optimizer.lr.hgih=2: there is no such field\n"
    "nearest: tune.parameters.optimizer.lr.high",
    "search.knobs={data.prefetch: {when: tp > 1}}": "search.knobs.data.prefetch.values is missing: it must be a list of at "
    "least 1, each true, false, a whole number, a number, text, or null",
    "lr=3": "lr=3 is outside any section; fields are section.field\nnearest: optimizer.lr",
    "model.preset=mpt-125n": f"model.preset=mpt-125n is not a preset {PRESETS}\nnearest: model.preset=mpt-125m",
    "data.sources=[{path: a, wieght: 3}]": "data.sources.0.wieght=3: there is no such field\n"
    "nearest: data.sources.0.weight",
    "training.profile={first: 1, last: 2, frist: 3}": "training.profile.frist=3: there is no such field\n"
    "nearest: training.profile.first",
    # wrong types
    "layout.microbatch='3'": f'layout.microbatch="3" must be {SAMPLES}\nnearest: layout.microbatch=3',
    "layout.microbatch=true": f"layout.microbatch=true must be {SAMPLES}",
    "layout.microbatch=2.5": f"layout.microbatch=2.5 must be {SAMPLES}",
    "training.steps=1e3": f"training.steps=1000.0 must be {COUNT}\nnearest: training.steps=1000",
    "training.steps=null": f"training.steps=null must be {COUNT}",
    "training.compile=1": "training.compile=1 must be true, false or auto",
    "training.tensorboard='true'": 'training.tensorboard="true" must be true or false',
    "optimizer.lr=fast": "optimizer.lr=fast must be a number greater than 0",
    "optimizer.betas=[0.9]": f"optimizer.betas=[0.9] must be {BETAS}",
    "optimizer.betas=0.9": f"optimizer.betas=0.9 must be {BETAS}",
    "data.sources=a": f"data.sources=a must be {SOURCES}",
    "data.sources=[3]": f"data.sources=[3] must be {SOURCES}",
    "data.sources=[]": f"data.sources=[] must be {SOURCES}",
    "layout=3": "layout=3 must be a mapping of fields",
    "training.profile=3": "training.profile=3 must be a mapping with first and last, or null",
    # impossible values
    "layout.microbatch=0": f"layout.microbatch=0 must be {SAMPLES}",
    "layout.dp_shard=-1": "layout.dp_shard=-1 must be a whole number from 1 to 10,000,000, or auto",
    "layout.dp_shard=atuo": "layout.dp_shard=atuo must be a whole number from 1 to 10,000,000, or auto\n"
    "nearest: layout.dp_shard=auto",
    "data.prefetch=65": "data.prefetch=65 must be a whole number from 0 to 64",
    "optimizer.betas=[0.9, 1]": f"optimizer.betas=[0.9, 1] must be {BETAS}",
    "optimizer.lr=1e999": "optimizer.lr=1e999 must be a number greater than 0",
    "layout.recompute=ful": "layout.recompute=ful must be none, selective or full\nnearest: layout.recompute=full",
    "layout.global_batch=0": f"layout.global_batch=0 must be {BATCH}",
    "layout.global_batch=2M": f"layout.global_batch=2M must be {BATCH}",
    "training.seed=-1": "training.seed=-1 must be a whole number of at least 0 and less than 9,223,372,036,854,775,808",
    "model.n_heads=7": "model: n_heads=7 does not divide d_model=4096; give head_dim or change one",
    "model.n_kv_heads=5": "model: n_kv_heads=5 does not divide n_heads=32",
    "model.head_dim=65": "model: rotary positions need an even head size, not 65",
    "model.rope_scaling={low_freq_factor: 8}": "model.rope_scaling: low_freq_factor=8.0 must be less than "
    "high_freq_factor=4.0",
    "training.profile={first: 3, last: 2}": "training.profile: last=2 comes before first=3",
    # beyond any computer
    "model.n_layers=1_000_000_000": "model.n_layers=1000000000 must be a whole number from 1 to 10,000",
    "model.d_model=10000000000000000000000000": "model.d_model=10000000000000000000000000 must be a whole number from 1 to "
    "1,000,000",
    "model.vocab_size=1_000_000_000_000_000": "model.vocab_size=1000000000000000 must be a whole number from 1 to "
    "100,000,000",
    "layout.global_batch=1_000_000_000_000": f"layout.global_batch=1000000000000 must be {BATCH}",
    "layout.global_batch=999999999999488 samples": "layout.global_batch=999999999999488 samples is "
    "999,999,999,999,488 samples; at most 1,000,000,000",
    "tune.parameters={optimizer.lr: {low: 1, high: 9999999999999999999}}": "tune.parameters.optimizer.lr.high: "
    "9999999999999999999 is too large; whole numbers reach from -1,000,000,000,000,000,000 to 1,000,000,000,000,000,000",
    "tune.asha={rungs: 101}": "tune.asha.rungs=101 must be a whole number from 1 to 100",
    # paths that cannot be opened
    'data.sources=["a\\0b"]': "data.sources.0: a path cannot hold the character NUL",
    f"training.run_dir={'d/' * 5000}": "training.run_dir: a path of 10,000 bytes; at most 4,096 can be opened",
    f"training.init_from={'n' * 300}": "training.init_from: a name of 300 bytes in a path; at most 255 can be opened",
    # missing
    "training={}": f"training.steps is missing: it must be {COUNT}",
    "data={}": "data.sources and data.sequence_length are missing: they have no defaults",
    "data.sources=[{}]": "data.sources.0.path is missing: it must be text",
    "model={n_layers: 1}": "model.d_model, model.n_heads, model.vocab_size and model.max_positions are missing: "
    f"give the whole shape, or model.preset {PRESETS}",
    # not an override at all
    "training.steps": "training.steps is not an override; write section.field=value",
    "training.steps=": "training.steps= has no value; write training.steps=null to unset a field",
    "training.steps.x=3": "training.steps.x: training.steps is 100 and holds no fields",
    "data.sources.7.weight=3": "data.sources.7.weight: data.sources.7 does not exist in the list",
    "training.profile={first: 3": "training.profile={first: 3 cannot be read: not valid YAML: "
    "expected ',' or '}', but got '<stream end>' while parsing a flow mapping",
    "training.run_dir=\udcff": r"'training.run_dir=\udcff' is not valid text in this terminal's encoding",
}


@pytest.mark.parametrize(("override", "message"), BY_OVERRIDE.items(), ids=ascii)
def test_override_mistakes(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(RUN, "run.yaml", [override])
    assert str(caught.value) == message


IN_FILE = [
    (
        "microbatch: 2",
        "microbach: 2",
        "layout.microbach=2: there is no such field (run.yaml:9)\nnearest: layout.microbatch",
    ),
    ("microbatch: 2", "microbatch: two", f"layout.microbatch=two must be {SAMPLES} (run.yaml:9)"),
    ("steps: 100", "step: 100", "training.step=100: there is no such field (run.yaml:13)\nnearest: training.steps"),
    ("optimizer:", "optimiser:", "optimiser is not a section of a run file (run.yaml:10)\nnearest: optimizer"),
    (
        "llama3-8b",
        "lama3-8b",
        f"model.preset=lama3-8b is not a preset {PRESETS} (run.yaml:2)\nnearest: model.preset=llama3-8b",
    ),
    ("weight: 2", "weight: -2", "data.sources.1.weight=-2 must be a number of at least 0 (run.yaml:5)"),
    (
        "n_layers: 4",
        "n_heads: 7",
        "model: n_heads=7 does not divide d_model=4096; give head_dim or change one (run.yaml:1)",
    ),
    ("  microbatch: 2", "  global_batch: 8", "layout.global_batch is given twice, first on line 8 (run.yaml:9)"),
    ("  steps: 100", "  seed: 1", f"training.steps is missing: it must be {COUNT} (run.yaml:12)"),
    ("training:\n  steps: 100\n", "", "section training is missing: give at least training.steps (run.yaml)"),
    (RUN[: RUN.index("data:")], "", f"section model is missing: give at least model.preset {PRESETS} (run.yaml)"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), IN_FILE)
def test_file_mistakes_name_the_line(right: str, wrong: str, message: str) -> None:
    assert right in RUN
    with pytest.raises(ConfigError) as caught:
        parse_run(RUN.replace(right, wrong), "run.yaml")
    assert str(caught.value) == message


def test_several_mistakes_are_all_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(RUN.replace("steps: 100", "steps: 0"), "run.yaml", ["layout.microbach=2", "model.preset=gpt3"])
    assert str(caught.value).splitlines() == [
        f"model.preset=gpt3 is not a preset {PRESETS}",
        "  nearest: model.preset=gpt2",
        "layout.microbach=2: there is no such field",
        "  nearest: layout.microbatch",
        f"training.steps=0 must be {COUNT} (run.yaml:13)",
    ]


def test_very_many_mistakes_are_cut() -> None:
    text = RUN + "".join(f"unknown{i}: {i}\n" for i in range(3000))
    with pytest.raises(ConfigError) as caught:
        parse_run(text, "run.yaml")
    assert str(caught.value).endswith("and 2980 more")


def test_a_preset_that_would_change_nothing_is_refused() -> None:
    whole = "{n_layers: 1, d_model: 64, n_heads: 1, vocab_size: 64, max_positions: 2048}"
    text = RUN.replace("\n  preset: llama3-8b\n  n_layers: 4", f" {whole}")
    assert parse_run(text, "run.yaml").model.d_model == 64
    with pytest.raises(ConfigError, match=r"model.preset=gpt2 would change nothing.*\nnearest: model=\{preset: gpt2\}"):
        parse_run(text, "run.yaml", ["model.preset=gpt2"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(RUN)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff")
    large = tmp_path / "large.yaml"
    large.write_text("#" * 300_000)
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    listed = tmp_path / "list.yaml"
    listed.write_text("- a\n")
    for file, message in {
        tmp_path
        / "quikstart.yaml": f"run file {tmp_path}/quikstart.yaml does not exist\nnearest: {tmp_path}/quickstart.yaml",
        tmp_path / "no" / "x.yaml": f"run file {tmp_path}/no/x.yaml does not exist",
        binary: f"run file {binary} is not UTF-8 text (byte 3)",
        large: f"larger than 256 KiB, which no run file is ({large})",
        empty: f"{empty} is empty; a run file holds sections (model, data, layout, optimizer, training)",
        listed: f"{listed} holds [a]; a run file holds sections (model, data, layout, optimizer, training)",
        tmp_path: f"folder {tmp_path} holds no run.yaml; give a run file or a run folder",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_run(file)
        assert str(caught.value) == message
    with pytest.raises(ConfigError, match=r"cannot be read: embedded null byte"):
        load_run(Path("a\0b.yaml"))
