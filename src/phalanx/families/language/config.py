"""The run file of the language family: what its sections are, and what of them does not fit together.

The shape of a decoder, `LanguageModel`, stands in `config.model`: layers and attention kernels of `nn` and `layout` are
described by it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from phalanx.config.families import Family
from phalanx.config.model import LanguageModel
from phalanx.config.problems import Problem
from phalanx.config.schema import Evaluation, Run
from phalanx.config.section import NonNegativeInt, PathText, Positions, PositiveInt, Section, Words
from phalanx.errors import ConfigError


def _source_from_path(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


class DataSource(Section):
    """One body of prepared text and its share of the training samples."""

    path: PathText
    """Folder written by `phalanx data prepare`, a Megatron `.bin/.idx` prefix, or a folder of MDS shards."""
    weight: Annotated[float, Field(ge=0.0)] = 1.0
    """Share of the samples drawn from this source, relative to the other sources' weights; 0 for one that joins later."""


class MixtureChange(Section):
    """Other weights of the sources from some step on."""

    after_step: PositiveInt
    """Last optimizer step with the weights before."""
    weights: Annotated[list[Annotated[float, Field(ge=0.0)]], Field(min_length=1)]
    """Weight of each source from then on, in the order of the sources; 0 leaves one out."""
    over_steps: NonNegativeInt = 0
    """Steps over which weights move there linearly, in up to 64 parts; 0 changes them at once."""


class LengthStage(Section):
    """Steps at the beginning of a run in which samples count as shorter ones."""

    steps: PositiveInt
    """Optimizer steps of this stage."""
    sequence_length: Positions
    """Tokens of each part of a sample, beyond which attention does not look; below `data.sequence_length`."""


class Data(Section):
    """What the model is trained on."""

    sources: Annotated[
        list[Annotated[DataSource, BeforeValidator(_source_from_path)]],
        Field(min_length=1),
        Words("a list of at least one, each a path or a mapping with path and weight"),
    ]
    """Where the tokens come from; a plain path stands for a source of weight 1."""
    mixture: list[MixtureChange] = Field(default_factory=list)
    """Changes of the weights during the run, one after the other, as for annealing on the best sources."""
    sequence_length: Positions
    """Tokens a sample."""
    length_warmup: list[LengthStage] = Field(default_factory=list)
    """Stages with which a run begins, one after the other, in which samples are cut into shorter ones, before they have
    sequence_length tokens; a step reads the same tokens with and without. Plans are for whole samples."""
    document_mask: bool = False
    """Whether attention stops at document boundaries inside a packed sample."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """Batches read ahead in the background; 0 reads in the training loop."""
    verify: bool = True
    """Whether checksums of all training data are compared in the background as training begins."""


class TaskEvaluation(Section):
    """Scores on in-context tasks during training, in whatever layout the run has."""

    files: Annotated[list[PathText], Field(min_length=1), Words("a list of at least one path")]
    """Task files (.jsonl, .jsonl.gz) and lists of tasks (.yaml) as LLM Foundry writes them."""
    every: PositiveInt | None = None
    """Steps between evaluations on tasks; null evaluates after the last step only."""
    shots: NonNegativeInt | None = None
    """Examples in front of each question; null takes what a list says, and 0 for a file alone."""
    questions: PositiveInt | None = 256
    """Questions of each task that are asked, from the first; null asks all."""


class TextEvaluation(Evaluation):
    """Held-out loss, scores on tasks and sample text during training."""

    prompt: str | None = None
    """Text the model continues after each evaluation, in a run of one rank whose data has a tokenizer."""
    prompt_tokens: Positions = 64
    """Tokens it may write."""
    tasks: TaskEvaluation | None = None
    """In-context tasks to score; null scores none."""


class LanguageRun(Run):
    """A run that trains a language model."""

    model: LanguageModel
    data: Data
    evaluation: TextEvaluation = TextEvaluation()

    def find_problems(self) -> Iterator[Problem]:
        """See `Run`."""
        model, evaluation, length = self.model, self.evaluation, self.data.sequence_length
        longest = model.max_positions
        if length > longest:
            yield Problem(
                ("data", "sequence_length"),
                f"data.sequence_length={length} is longer than model.max_positions={longest}",
                f"data.sequence_length={longest} or model.max_positions={length}",
            )
        yield from _check_length_warmup(self)
        yield from _check_attention(self)
        if evaluation.prompt is not None and evaluation.prompt_tokens >= longest:
            yield Problem(
                ("evaluation", "prompt_tokens"),
                f"evaluation.prompt_tokens={evaluation.prompt_tokens} leaves no room for the prompt in "
                f"model.max_positions={longest}",
                f"evaluation.prompt_tokens={max(1, longest // 2)}",
            )
        yield from _check_mixture(self)
        # muP's rates are for updates of the size of Adam's.
        if model.mup_base_width is not None and self.optimizer.name not in ("adamw", "lion"):
            yield Problem(
                ("model", "mup_base_width"),
                f"model.mup_base_width={model.mup_base_width} scales the rates of adamw and lion, and "
                f"optimizer.name={self.optimizer.name}",
                "optimizer.name=adamw or model.mup_base_width=null",
            )

    @property
    def sample_tokens(self) -> int:
        """See `Run`."""
        return self.data.sequence_length

    @property
    def data_names(self) -> list[str]:
        """See `Run`."""
        return [source.path for source in self.data.sources]


def _check_length_warmup(run: LanguageRun) -> Iterator[Problem]:
    """Yield a problem for a stage whose samples are not shorter than those of the steps after all stages."""
    whole = run.data.sequence_length
    for number, stage in enumerate(run.data.length_warmup):
        if stage.sequence_length >= whole:
            name = f"data.length_warmup.{number}.sequence_length"
            yield Problem(
                ("data", "length_warmup", number, "sequence_length"),
                f"{name}={stage.sequence_length} must be below data.sequence_length={whole}",
                f"{name}={max(1, whole // 2)}",
            )


def _check_mixture(run: LanguageRun) -> Iterator[Problem]:
    """Yield a problem for a change that names other sources, or comes before the one before it has ended."""
    known, free = len(run.data.sources), 0
    for number, source in enumerate(run.data.sources):
        # A source of weight 0 may join by a later change.
        later = (change.weights[number] for change in run.data.mixture if number < len(change.weights))
        if not source.weight and not any(later):
            name = f"data.sources.{number}.weight"
            yield Problem(
                ("data", "sources", number, "weight"), f"{name}=0 draws no sample from {source.path}", f"{name}=1"
            )
    if not any(source.weight for source in run.data.sources):
        yield Problem(("data", "sources"), "data.sources: one weight must be above 0 from the first step on")
    for number, change in enumerate(run.data.mixture):
        name = f"data.mixture.{number}"
        if len(change.weights) != known or not any(change.weights):
            wanted = f"{known} weights, one a source, of which one is above 0"
            yield Problem(("data", "mixture", number, "weights"), f"{name}.weights={change.weights} must be {wanted}")
        if change.after_step < free:
            yield Problem(
                ("data", "mixture", number, "after_step"),
                f"{name}.after_step={change.after_step} comes before step {free}, at which the change before it ends",
                f"{name}.after_step={free}",
            )
        # A ramp must end before the next change begins.
        free = change.after_step + change.over_steps


def _check_attention(run: LanguageRun) -> Iterator[Problem]:
    """Yield a problem where a named kernel cannot compute the run and gives way to no other.

    FlashAttention-4 has no bias, no mask but the causal one, and two formats; FlexAttention adds up in 32 bits. Caps and
    sinks are for FlexAttention and plain products. cuDNN's backward pass adds up in another order each time.
    """
    kernel, precision = run.training.attention, run.layout.precision
    model = run.model
    softmax = {
        f"model.attention_softcap={model.attention_softcap}": model.attention_softcap is not None,
        "model.attention_sinks=true": model.attention_sinks,
    }
    unfit = {
        **dict.fromkeys(("flash", "efficient"), softmax),
        "cudnn": {**softmax, "training.deterministic=true": run.training.deterministic},
        "flash4": {
            **softmax,
            "model.latent": model.latent is not None,
            "model.positions=alibi": model.positions == "alibi",
            f"model.sliding_window={model.sliding_window}": model.sliding_window is not None,
            "data.document_mask=true": run.data.document_mask,
            "data.length_warmup": bool(run.data.length_warmup),
            f"layout.precision={precision}": precision not in ("bf16", "fp16"),
        },
        "flex": {f"layout.precision={precision}": precision == "fp64"},
    }
    # Kernels that are not named here give way to another one where they must.
    for stated, present in unfit.get(kernel, {}).items():
        if present:
            yield Problem(
                ("training", "attention"),
                f"training.attention={kernel} cannot compute with {stated}",
                "training.attention=auto",
            )


def require_language(run: Run, what: str) -> LanguageRun:
    """Return `run` as one of a language model. Raises ConfigError for other families.

    what: the thing that only language models can do, as the subject of a sentence.
    """
    if not isinstance(run, LanguageRun):
        raise ConfigError(f"{what} works for model.family=language, not for model.family={run.model.family}")
    return run


FAMILY = Family(
    name="language",
    run=LanguageRun,
    bound="phalanx.families.language.trained:TrainedLanguage",
    checked="phalanx.families.language.bound:BoundLanguage",
    sizes="phalanx.families.language.sizes",
    presets=Path(__file__).with_name("presets"),
    recipes=Path(__file__).with_name("recipes"),
    start=Path(__file__).with_name("start.yaml"),
)
"""The language family as run files know it."""
