"""Rules between sections of a run file. Pure: reads a `Run`, allocates nothing, and knows no device and no world size.

Rules inside one section are checked where the section is declared; rules that need the number of ranks belong to the
layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.config.document import FieldPath, dotted_name
from phalanx.config.problems import Problem, config_error
from phalanx.config.schema import RESUME_WORDS, Run
from phalanx.config.section import MAX_BATCH_SAMPLES
from phalanx.errors import nearest_names


def check_run(run: Run, *, trains: bool = True) -> list[Problem]:
    """Return everything that does not fit together in `run`; empty for a sound one. trains: see `load_run`."""
    rules = (_check_batch, _check_optimizer, _check_training, _check_checkpoints, _check_safeguards)
    found = [problem for rule in rules for problem in rule(run)]
    if trains:
        found += run.find_training_problems()
    return [*run.find_problems(), *found]


def global_batch_samples(run: Run) -> int:
    """Return the samples of an optimizer step over all ranks, as the run file states them in samples or tokens.

    Those of the steps after a warm-up of the batch. Raises ConfigError where a batch in tokens is not a whole number of
    samples.
    """
    return _count_samples(run, run.layout.global_batch, ("layout", "global_batch"))


@dataclass(frozen=True)
class BatchSizes:
    """Samples of the global batch of each step, in closed form: step 10**9 costs what step 1 costs."""

    final: int
    """Samples of a step after all stages."""
    stages: tuple[tuple[int, int], ...] = ()
    """Steps and samples of a step of each stage at the beginning."""

    def of_step(self, step: int) -> int:
        """Return the samples of optimizer step `step`, from 1."""
        return self.samples_through(step) - self.samples_through(step - 1)

    def samples_through(self, step: int) -> int:
        """Return the samples of the first `step` steps together."""
        total, left = 0, step
        for steps, samples in self.stages:
            total += min(left, steps) * samples
            left = max(0, left - steps)
        return total + left * self.final


def batch_sizes(run: Run) -> BatchSizes:
    """Return the global batch of each step. Raises as `global_batch_samples` does."""
    stages = tuple(
        (stage.steps, _count_samples(run, stage.global_batch, ("layout", "batch_warmup", number, "global_batch")))
        for number, stage in enumerate(run.layout.batch_warmup)
    )
    return BatchSizes(global_batch_samples(run), stages)


def _count_samples(run: Run, stated: int | str, path: FieldPath) -> int:
    amount, unit = _read_batch(stated)
    if unit == "samples":
        return amount
    problems = list(_batch_in_tokens(run, stated, path))
    if problems:
        raise config_error(problems)
    assert run.sample_tokens is not None
    return amount // run.sample_tokens


def _check_batch(run: Run) -> Iterator[Problem]:
    """Yield a problem for a batch that is no whole number of samples, larger than is possible, or not divided evenly."""
    problems = list(_batch_in_tokens(run, run.layout.global_batch, ("layout", "global_batch")))
    for number, stage in enumerate(run.layout.batch_warmup):
        problems += _batch_in_tokens(run, stage.global_batch, ("layout", "batch_warmup", number, "global_batch"))
    if problems:
        yield from problems
        return
    # From here on all sizes are whole numbers of samples.
    sizes = batch_sizes(run)
    for number, (_, warm) in enumerate(sizes.stages):
        if warm > sizes.final:
            path = ("layout", "batch_warmup", number, "global_batch")
            yield Problem(
                path,
                f"{dotted_name(path)} is {warm} samples, more than the {sizes.final} of layout.global_batch",
                f"{dotted_name(path)}={sizes.final}",
            )
    samples, microbatch = global_batch_samples(run), run.layout.microbatch
    if samples > MAX_BATCH_SAMPLES:
        yield Problem(
            ("layout", "global_batch"),
            f"layout.global_batch={run.layout.global_batch} is {samples:,} samples; at most {MAX_BATCH_SAMPLES:,}",
        )
    elif microbatch != "auto" and samples % microbatch:
        yield Problem(
            ("layout", "microbatch"),
            f"layout.microbatch={microbatch} does not divide the global batch of {samples} samples",
            " or ".join(f"layout.microbatch={choice}" for choice in _nearest_divisors(samples, microbatch)),
        )


def _batch_in_tokens(run: Run, stated: int | str, path: FieldPath) -> Iterator[Problem]:
    amount, unit = _read_batch(stated)
    if unit == "samples":
        return
    length, name = run.sample_tokens, dotted_name(path)
    if length is None:
        yield Problem(
            path,
            f"{name}={amount} tokens: only text has tokens; a {run.model.family} batch is counted in samples",
            f"{name}=16",
        )
        return
    # A step takes whole samples.
    if amount % length:
        below = amount // length
        choices = [f"{count * length} tokens ({count} samples)" for count in (below, below + 1) if count]
        yield Problem(
            path,
            f"{name}={amount} tokens is not a multiple of data.sequence_length={length}",
            " or ".join(choices),
        )


_MUON_FIELDS = ("momentum", "nesterov", "newton_schulz_steps", "adamw_lr_ratio")
"""Fields of the optimizer section that AdamW and Lion have no use for."""


def _check_optimizer(run: Run) -> Iterator[Problem]:
    """Yield a problem for steps of warm-up and decay that do not fit into the run, and for fields of another optimizer."""
    optimizer, steps = run.optimizer, run.training.steps
    path: FieldPath = ("optimizer", "warmup_steps")
    stated = f"optimizer.warmup_steps={optimizer.warmup_steps}"
    if optimizer.warmup_steps > steps:
        yield Problem(path, f"{stated} is more than training.steps={steps}", f"optimizer.warmup_steps={steps}")
    elif optimizer.schedule == "wsd":
        # As optimizers.learning_rate counts them: rounding up would add a step wherever the product is not exact.
        decay = round(optimizer.decay_fraction * steps)
        # Warm-up and decay would overlap.
        if optimizer.warmup_steps + decay > steps:
            yield Problem(
                path,
                f"{stated} and the {decay} steps of decay (optimizer.decay_fraction={optimizer.decay_fraction}) "
                f"are more than training.steps={steps}",
                f"optimizer.warmup_steps={steps - decay}",
            )
    # What an optimizer of a package makes of them is its own affair.
    if optimizer.name not in ("adamw", "lion"):
        return
    for name in _MUON_FIELDS:
        value, plain = getattr(optimizer, name), type(optimizer).model_fields[name].default
        if value != plain:
            yield Problem(
                ("optimizer", name),
                f"optimizer.{name}={value} says how Muon updates, and optimizer.name={optimizer.name}",
                f"optimizer.name=muon or optimizer.{name}={plain}",
            )


def _check_training(run: Run) -> Iterator[Problem]:
    for name in ("profile", "memory_snapshot"):
        window = getattr(run.training, name)
        if window is not None and window.last > run.training.steps:
            yield Problem(
                ("training", name, "last"),
                f"training.{name}.last={window.last} comes after the last step, training.steps={run.training.steps}",
            )
    resume = run.training.resume
    # A path is written with a slash, or at least a dot: a word that is neither known nor like that is a slip.
    written_as_path = any(character in resume for character in "/\\.")
    if resume not in RESUME_WORDS and not written_as_path and (matches := nearest_names(resume, RESUME_WORDS)):
        yield Problem(
            ("training", "resume"),
            f"training.resume={resume} is none of {', '.join(RESUME_WORDS)}, and a path is written with a slash",
            f"training.resume={matches[0]}",
        )
    transfer = run.training.transfer
    given = [name for name in type(transfer).model_fields if getattr(transfer, name)]
    if given and run.training.init_from is None:
        yield Problem(
            ("training", "transfer"),
            f"training.transfer.{given[0]} says what is taken of the weights in training.init_from, which is null",
            "training.init_from=RUN_DIR",
        )


def _check_checkpoints(run: Run) -> Iterator[Problem]:
    every, keep = run.checkpoint.every, run.checkpoint.keep_every
    # Steps to be kept are saved as well, whatever is chosen.
    if keep is None or every == "auto":
        return
    path: FieldPath = ("checkpoint", "keep_every")
    if every is None:
        yield Problem(path, f"checkpoint.keep_every={keep} has no effect while checkpoint.every is null")
    elif keep % every:
        below = keep // every * every
        choices = [f"checkpoint.keep_every={choice}" for choice in (below, below + every) if choice]
        yield Problem(
            path, f"checkpoint.keep_every={keep} is not a multiple of checkpoint.every={every}", " or ".join(choices)
        )


def _check_safeguards(run: Run) -> Iterator[Problem]:
    if run.safeguards.replay and run.layout.scales_loss:
        yield Problem(
            ("safeguards", "replay"),
            f"safeguards.replay=true: layout.precision={run.layout.precision} finds its loss scale by steps that are not "
            "finite, so no step can be told to be wrong",
            "layout.precision=bf16",
        )


def _read_batch(stated: int | str) -> tuple[int, str]:
    """Return the amount and the unit of a global batch as the run file states it."""
    if isinstance(stated, int):
        return stated, "samples"
    amount, unit = stated.split(" ")
    return int(amount.replace("_", "")), unit


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return divisors of `number` just below and just above `wanted`, looked for in its neighbourhood only."""
    # A batch may have 10**9 samples: a message is not worth trying all numbers up to that.
    below = next((d for d in range(min(wanted, number), max(0, wanted - 10_000), -1) if number % d == 0), 1)
    above = next((d for d in range(wanted, min(number, wanted + 10_000) + 1) if number % d == 0), None)
    return [below] if above is None else [below, above]
