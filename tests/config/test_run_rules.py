"""Rules between sections, and the global batch."""

import pytest

from config.run_text import RUN
from phalanx.config.check import check_run, global_batch_samples
from phalanx.config.load import parse_run
from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.sequence_length=16384"],
            "data.sequence_length=16384 is longer than model.max_positions=8192\n"
            "nearest: data.sequence_length=8192 or model.max_positions=16384",
        ),
        (
            ["training.attention=flash4", "data.document_mask=true"],
            "training.attention=flash4 cannot compute with data.document_mask=true\nnearest: training.attention=auto",
        ),
        (
            ["training.attention=cudnn", "training.deterministic=true"],
            "training.attention=cudnn cannot compute with training.deterministic=true\nnearest: training.attention=auto",
        ),
        (
            ["training.attention=flash4", "layout.precision=fp32"],
            "training.attention=flash4 cannot compute with layout.precision=fp32\nnearest: training.attention=auto",
        ),
        (
            ["training.attention=flash4", "layout.precision=fp64"],
            "training.attention=flash4 cannot compute with layout.precision=fp64\nnearest: training.attention=auto",
        ),
        (
            ["training.attention=flex", "layout.precision=fp64"],
            "training.attention=flex cannot compute with layout.precision=fp64\nnearest: training.attention=auto",
        ),
        (
            ["data.mixture=[{after_step: 10, weights: [1]}]"],
            "data.mixture.0.weights=[1.0] must be 2 weights, one a source, of which one is above 0",
        ),
        (
            ["data.mixture=[{after_step: 10, weights: [1, 0], over_steps: 5}, {after_step: 12, weights: [0, 1]}]"],
            "data.mixture.1.after_step=12 comes before step 15, at which the change before it ends\n"
            "nearest: data.mixture.1.after_step=15",
        ),
        (
            ["data.length_warmup=[{steps: 5, sequence_length: 512}, {steps: 5, sequence_length: 2048}]"],
            "data.length_warmup.1.sequence_length=2048 must be below data.sequence_length=2048\n"
            "nearest: data.length_warmup.1.sequence_length=1024",
        ),
        (
            ["data.sources.1.weight=0"],
            "data.sources.1.weight=0 draws no sample from data/b\nnearest: data.sources.1.weight=1",
        ),
        (
            ["layout.batch_warmup=[{steps: 5, global_batch: 100000 tokens}]"],
            "layout.batch_warmup.0.global_batch=100000 tokens is not a multiple of data.sequence_length=2048\n"
            "nearest: 98304 tokens (48 samples) or 100352 tokens (49 samples)",
        ),
        (
            ["layout.global_batch=1000000 tokens"],
            "layout.global_batch=1000000 tokens is not a multiple of data.sequence_length=2048\n"
            "nearest: 999424 tokens (488 samples) or 1001472 tokens (489 samples)",
        ),
        (
            ["layout.global_batch=100 tokens"],
            "layout.global_batch=100 tokens is not a multiple of data.sequence_length=2048\n"
            "nearest: 2048 tokens (1 samples)",
        ),
        (
            ["layout.microbatch=3"],
            "layout.microbatch=3 does not divide the global batch of 256 samples\n"
            "nearest: layout.microbatch=2 or layout.microbatch=4",
        ),
        (
            ["layout.microbatch=512"],
            "layout.microbatch=512 does not divide the global batch of 256 samples\nnearest: layout.microbatch=256",
        ),
        (
            ["optimizer.warmup_steps=101"],
            "optimizer.warmup_steps=101 is more than training.steps=100\nnearest: optimizer.warmup_steps=100",
        ),
        (
            ["optimizer.warmup_steps=81", "optimizer.schedule=wsd"],
            "optimizer.warmup_steps=81 and the 20 steps of decay (optimizer.decay_fraction=0.2) are more than "
            "training.steps=100\nnearest: optimizer.warmup_steps=80",
        ),
        (
            ["optimizer.momentum=0.9"],
            "optimizer.momentum=0.9 says how Muon updates, and optimizer.name=adamw\n"
            "nearest: optimizer.name=muon or optimizer.momentum=0.95",
        ),
        (
            ["training.profile={first: 99, last: 101}"],
            "training.profile.last=101 comes after the last step, training.steps=100",
        ),
        (
            ["training.memory_snapshot={first: 200, last: 201}"],
            "training.memory_snapshot.last=201 comes after the last step, training.steps=100",
        ),
        (["checkpoint.keep_every=50"], "checkpoint.keep_every=50 has no effect while checkpoint.every is null"),
        (
            ["checkpoint.keep_every=50", "checkpoint.every=20"],
            "checkpoint.keep_every=50 is not a multiple of checkpoint.every=20\n"
            "nearest: checkpoint.keep_every=40 or checkpoint.keep_every=60",
        ),
        (
            ["evaluation.prompt=Once", "evaluation.prompt_tokens=8192"],
            "evaluation.prompt_tokens=8192 leaves no room for the prompt in model.max_positions=8192\n"
            "nearest: evaluation.prompt_tokens=4096",
        ),
        (
            ["training.resume=nevr"],
            "training.resume=nevr is none of auto, must, never, and a path is written with a slash\n"
            "nearest: training.resume=never",
        ),
        (
            ["model.positions=alibi", "model.rope_scaling={}"],
            "model: rope_scaling has no effect with positions=alibi; set it to null",
        ),
    ],
)
def test_rules(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(RUN, "run.yaml", overrides)
    assert str(caught.value).replace(" (run.yaml:8)", "") == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.sequence_length=8192"],
        ["layout.microbatch=256"],
        ["optimizer.warmup_steps=100"],
        ["optimizer.warmup_steps=80", "optimizer.schedule=wsd"],
        # 0.07 * 100 is a little more than 7.
        ["optimizer.warmup_steps=93", "optimizer.schedule=wsd", "optimizer.decay_fraction=0.07"],
        ["training.profile={first: 100, last: 100}"],
        ["checkpoint.keep_every=60", "checkpoint.every=20"],
        ["evaluation.prompt_tokens=100000"],
        ["training.resume=runs/a/step-10"],
        # Others stay behind a kernel that is named, but for two of them.
        *(
            [f"training.attention={name}", "layout.precision=fp64"]
            for name in ("sdpa", "cudnn", "flash", "efficient", "math", "auto")
        ),
        ["training.attention=flex", "layout.precision=fp32"],
    ],
)
def test_edges_of_the_rules_are_sound(overrides: list[str]) -> None:
    assert check_run(parse_run(RUN, "run.yaml", overrides)) == []


@pytest.mark.parametrize(
    ("stated", "samples"),
    [("512", 512), ("512 samples", 512), ("524288 tokens", 256), ("524_288 tokens", 256), ("4096 tokens", 2)],
)
def test_global_batch_samples(stated: str, samples: int) -> None:
    assert global_batch_samples(parse_run(RUN, "run.yaml", [f"layout.global_batch={stated}"])) == samples


def test_global_batch_samples_never_rounds() -> None:
    run = parse_run(RUN, "run.yaml")
    uneven = run.model_copy(update={"layout": run.layout.model_copy(update={"global_batch": "2049 tokens"})})
    with pytest.raises(ConfigError, match=r"nearest: 2048 tokens \(1 samples\) or 4096 tokens \(2 samples\)"):
        global_batch_samples(uneven)
