"""`phalanx evaluate`: held-out loss, perplexity and bits per byte, or scores on in-context tasks."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from importlib import metadata

from phalanx.cli.console import make_progress_bar, print_json, print_lines, print_pairs, print_table
from phalanx.cli.options.models import EvaluateArguments
from phalanx.cli.ranks import start_or_join_ranks
from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.held_out import Scores, Sharing, score_model
from phalanx.families.language.evaluation.icl_tasks import load_tasks
from phalanx.families.language.evaluation.in_context import HarnessScore, score_tasks
from phalanx.families.language.evaluation.load_weights import LoadedModel, load_for_inference
from phalanx.formatting import format_number
from phalanx.layout.mesh import Ranks, leave_process_group
from phalanx.nn.precision import find_number_format
from phalanx.report.page_sections import SCORE_COLUMNS
from phalanx.report.table import Column

_HARNESS_COLUMNS = (
    Column[HarnessScore]("task", lambda score: score.task, align="left"),
    Column[HarnessScore]("metric", lambda score: score.metric, align="left"),
    Column[HarnessScore]("value", lambda score: format_number(score.value)),
    Column[HarnessScore]("questions", lambda score: "" if score.questions is None else f"{score.questions:,}"),
)


def run_evaluate(asked: EvaluateArguments) -> None:
    """Run the subcommand."""
    if asked.harness_tasks is not None and not asked.harness:
        raise ConfigError("--harness-tasks is for --harness; name a task of that folder with it")
    if asked.tasks and asked.harness:
        raise ConfigError("--tasks and --harness score in different ways; give one of them")
    if asked.tasks:
        _run_tasks(asked)
        return
    if asked.harness:
        _run_harness(asked, asked.harness)
        return
    for name in ("shots", "questions"):
        if getattr(asked, name) is not None:
            raise ConfigError(f"--{name} is for --tasks and --harness; leave it out to score held-out text")
    ranks, loaded = _load_on_ranks(asked)
    start = time.perf_counter()
    with make_progress_bar() as bar:
        task = bar.add_task(asked.split, visible=ranks.first)
        scores = score_model(
            loaded,
            data=asked.data,
            split=asked.split,
            samples=asked.samples,
            sequence_length=asked.length,
            rank=ranks.rank,
            ranks=ranks.world_size,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    # Loading is not counted: it is the disk's speed
    seconds = time.perf_counter() - start
    leave_process_group()
    if not ranks.first:
        return
    if asked.as_json:
        print_json(
            {
                "checkpoint": str(loaded.where),
                "step": loaded.step,
                "split": scores.split,
                "sequence_length": scores.sequence_length,
                "samples": scores.samples,
                "samples_in_all": scores.samples_in_all,
                **scores.total.as_dict(),
                "sources": {path: held_out.as_dict() for path, held_out in scores.sources.items()},
                "seconds": seconds,
                "tokens_per_second": scores.total.tokens / seconds,
            }
        )
    else:
        _print_scores(loaded, scores)


def _load_on_ranks(asked: EvaluateArguments) -> tuple[Ranks, LoadedModel]:
    """Start or join the ranks that share the work; return them, and the whole model, which each of them holds."""
    dtype = find_number_format(asked.precision, "--precision")
    ranks, device = start_or_join_ranks(asked.nproc, asked.device)
    return ranks, load_for_inference(asked.checkpoint, device, dtype=dtype, tokenizer=asked.tokenizer, ema=asked.ema)


def _print_scores(loaded: LoadedModel, scores: Scores) -> None:
    whole = scores.samples == scores.samples_in_all
    part = "every token" if whole else f"{scores.samples:,} of {scores.samples_in_all:,} samples"
    print_lines([f"{loaded.where} on the {scores.split} split: {part}, {scores.sequence_length:,} tokens a sample"])
    if len(scores.sources) > 1:
        for path, held_out in scores.sources.items():
            bits = "" if held_out.bits_per_byte is None else f", {held_out.bits_per_byte:.4f} bits a byte"
            loss = (
                "no samples"
                if math.isnan(held_out.loss) and not held_out.tokens
                else f"{held_out.loss:.4f} nats a token"
            )
            print_pairs([(path, f"{loss}{bits}, {held_out.tokens:,} tokens")])
    total = scores.total
    pairs = [("loss", f"{total.loss:.4f} nats a token"), ("perplexity", f"{total.perplexity:.3f}")]
    if total.bits_per_byte is not None:
        pairs.append(("bits per byte", f"{total.bits_per_byte:.4f} ({total.bytes:,} bytes of text)"))
    print_pairs([*pairs, ("tokens", f"{total.tokens:,}")])


def _run_tasks(asked: EvaluateArguments) -> None:
    tasks = load_tasks(asked.tasks or [], asked.shots)
    ranks, loaded = _load_on_ranks(asked)
    start = time.perf_counter()
    with make_progress_bar() as bar:
        task = bar.add_task("tasks", visible=ranks.first)
        scores = score_tasks(
            loaded,
            tasks,
            questions=asked.questions,
            sharing=Sharing(ranks.rank, ranks.world_size),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    seconds = time.perf_counter() - start
    leave_process_group()
    if not ranks.first:
        return
    if asked.as_json:
        tables = [score.as_dict() for score in scores]
        print_json({"checkpoint": str(loaded.where), "step": loaded.step, "tasks": tables, "seconds": seconds})
        return
    print_lines([f"{loaded.where} on {len(scores)} tasks"])
    print_table(SCORE_COLUMNS, scores)


def _run_harness(asked: EvaluateArguments, names: list[str]) -> None:
    """Score the model on tasks of lm-evaluation-harness and print a row a task; ranks share the requests."""
    try:
        from phalanx.families.language.evaluation.lm_harness import score_harness_tasks  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        raise ConfigError('--harness needs lm-evaluation-harness: pip install "phalanx-train[harness]"') from error
    ranks, loaded = _load_on_ranks(asked)
    start = time.perf_counter()
    scores = score_harness_tasks(
        loaded,
        names,
        folder=asked.harness_tasks,
        shots=asked.shots,
        questions=asked.questions,
        sharing=Sharing(ranks.rank, ranks.world_size),
    )
    seconds = time.perf_counter() - start
    leave_process_group()
    if not ranks.first:
        return
    if asked.as_json:
        tables = [asdict(score) for score in scores]
        print_json({"checkpoint": str(loaded.where), "step": loaded.step, "scores": tables, "seconds": seconds})
        return
    print_lines([f"{loaded.where} by lm-evaluation-harness {metadata.version('lm-eval')}"])
    print_table(_HARNESS_COLUMNS, scores)
