"""What a language run reads, and its evaluation: held-out loss and sample text, measured the same way each time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from phalanx.config.check import batch_sizes
from phalanx.config.model import LanguageModel, Model
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.open_tokens import (
    describe_tokens,
    open_source,
    open_training,
    require_tokenizer,
    token_names,
    token_path,
    tokenizer_files,
)
from phalanx.families.language.data.token_batches import SampleReader, TokenBatchStream
from phalanx.families.language.data.token_source import TokenSource
from phalanx.families.language.evaluation.generation import generate_tokens
from phalanx.families.language.evaluation.held_out import HeldOut, Sharing, score_split, spread_samples
from phalanx.families.language.evaluation.icl_tasks import load_run_tasks
from phalanx.families.language.evaluation.layout_scores import TaskEvaluator
from phalanx.families.language.evaluation.text_tokenizer import TextTokenizer
from phalanx.families.language.huggingface.folder_files import (
    TOKENIZER_FOLDER,
    SpecialTokens,
    TokenizerFiles,
    is_huggingface_folder,
)
from phalanx.formatting import shorten_blank_lines
from phalanx.layout.execute import Executor
from phalanx.layout.mesh import Mesh
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.resizing import Resizes, match_rows, resample_grid
from phalanx.remote_files import is_kept_elsewhere
from phalanx.training.inputs import (
    ExpectedEvaluation,
    Finding,
    Inputs,
    ScheduledEvaluator,
    TrainableModel,
    Verification,
)


@dataclass(frozen=True)
class TextInputs(Inputs):
    """Opened text of a run."""

    tokenizer: TokenizerFiles = field(default_factory=lambda: TokenizerFiles({}, SpecialTokens()))
    """The tokenizer of the first source that has one; empty when none has."""
    max_positions: int = 0
    """Positions of the model."""

    def write(self, run_dir: Path) -> None:
        """Write the tokenizer."""
        folder = run_dir / TOKENIZER_FOLDER
        folder.mkdir(exist_ok=True)
        self.tokenizer.write(folder, self.max_positions)


class LanguageInputs(TrainableModel):
    """See `training.inputs.TrainableModel`."""

    run: LanguageRun

    def how_to_import(self, path: Path) -> str:
        """Say that `phalanx convert` reads `path`, where that is a Hugging Face folder."""
        if not is_huggingface_folder(path):
            return ""
        return (
            f"; {path} is a Hugging Face folder: `phalanx convert {path} imported` makes a checkpoint of it, "
            f"and training.init_from=imported starts from that"
        )

    def resizes(self, path: Path, before: Model) -> Resizes:
        """See `TrainableModel`: rows of tokens go by their text where both sides know it, else by number."""
        model = self.run.model
        if not isinstance(before, LanguageModel):
            return []
        found: Resizes = []
        names = token_names(self.run, path, before.vocab_size)
        if names[0] != names[1]:
            rows = match_rows(*names, "tokens")
            found += [("embedding.weight", rows), ("head.weight", rows)]
        if before.max_positions != model.max_positions and model.positions == "learned":
            found.append(("embedding.positions", resample_grid((before.max_positions, 1), (model.max_positions, 1))))
        return found

    def open_inputs(self, layout: ResolvedLayout, mesh: Mesh, device: torch.device, *, first: bool) -> Inputs:
        """See `TrainableModel`."""
        run = self.run
        training = open_training(run)
        reader = open_reader(run, training)
        tasks = load_run_tasks(run)
        stream = TokenBatchStream(
            reader,
            global_batch=batch_sizes(run),
            rank=mesh.data_rank,
            ranks=layout.data_ranks,
            prefetch=run.data.prefetch,
            pin_memory=device.type != "cpu",
        )
        # Sources that come with a tokenizer were compared: it is the same.
        files = tokenizer_files(training)
        tokenizer = TextTokenizer.from_files(files, training[0].path) if files.files else None
        prompt, most = run.evaluation.prompt, run.model.max_positions
        if layout.world_size == 1 and prompt is not None and tokenizer is not None:
            count = len(tokenizer.encode_prompt(prompt))
            if count >= most:
                raise ConfigError(
                    f"evaluation.prompt has {count} tokens, and model.max_positions={most} leaves none to continue it; "
                    "give a shorter one"
                )
        evaluator = TextEvaluator(
            run=run,
            sources=_held_out(run),
            tokenizer=tokenizer,
            token_bytes_V=None if tokenizer is None else tokenizer.byte_counts(run.model.vocab_size),
            device=device,
        )
        others: list[ScheduledEvaluator] = []
        if run.evaluation.tasks is not None:
            scorer = TaskEvaluator(
                run.evaluation.tasks, tasks, require_tokenizer(tokenizer, training), run.data.sequence_length, device
            )
            others.append(ScheduledEvaluator(run.evaluation.tasks.every, scorer))
        near = [source for source in training if not is_kept_elsewhere(source.path)]
        verification = Verification(near if run.data.verify and first else [])
        saved = {"special_tokens": files.special.as_config()}
        return TextInputs(
            stream,
            evaluator,
            verification,
            saved,
            describe_tokens(training),
            tuple(others),
            tokenizer=files,
            max_positions=run.model.max_positions,
        )

    def expected_evaluation(self) -> ExpectedEvaluation | None:
        """See `TrainableModel`."""
        run = self.run
        held_out = _held_out(run)
        if not held_out:
            return None
        text = all(source.tokenizer is not None for source in held_out)
        fields = HeldOut(0.0, 1, 1 if text else None).as_dict()
        return ExpectedEvaluation(dict(fields), frozenset(("loss", "perplexity", "bits_per_byte")))


def open_reader(run: LanguageRun, training: list[TokenSource]) -> SampleReader:
    """Return what reads samples of the opened sources."""
    weights = [source.weight for source in run.data.sources]
    reader = SampleReader(
        list(zip(training, weights, strict=True)),
        sequence_length=run.data.sequence_length,
        seed=run.training.seed,
        documents=run.data.document_mask,
        changes=mixture_changes(run),
        lengths=attended_lengths(run),
    )
    reader.require_vocabulary(run.model.vocab_size)
    return reader


RAMP_PARTS = 64
"""Parts of equal weights in which weights of sources move to others."""


def mixture_changes(run: LanguageRun) -> list[tuple[int, list[float]]]:
    """Return the weights of sources after each change of the mixture, with the number of the first sample drawn by them."""
    sizes, weights = batch_sizes(run), [source.weight for source in run.data.sources]
    found: list[tuple[int, list[float]]] = []
    for change in run.data.mixture:
        # As shares, so that half way there is half way, however large the numbers are.
        before, after = ([weight / sum(given) for weight in given] for given in (weights, change.weights))
        parts = min(RAMP_PARTS, change.over_steps)
        for part in range(parts):
            step, moved = change.after_step + part * change.over_steps // parts, (part + 0.5) / parts
            mixed = [a + moved * (b - a) for a, b in zip(before, after, strict=True)]
            found.append((sizes.samples_through(step), mixed))
        found.append((sizes.samples_through(change.after_step + change.over_steps), list(change.weights)))
        weights = change.weights
    return found


def attended_lengths(run: LanguageRun) -> list[tuple[int, int]]:
    """Return the length of samples in each stage of `data.length_warmup` and after, with the number of its first sample."""
    sizes, stages = batch_sizes(run), run.data.length_warmup
    ends = itertools.accumulate((stage.steps for stage in stages), initial=0)
    lengths = [*(stage.sequence_length for stage in stages), run.data.sequence_length]
    return [(sizes.samples_through(step), length) for step, length in zip(ends, lengths, strict=True)]


def _held_out(run: LanguageRun) -> list[TokenSource]:
    """Open the validation splits that hold anything to predict."""
    opened = [open_source(token_path(source.path), "validation") for source in run.data.sources]
    return [source for source in opened if source is not None and source.tokens > 1]


@dataclass(frozen=True)
class TextEvaluator:
    """Evaluates one model again and again: the same samples, the same prompt, greedy continuation."""

    run: LanguageRun
    sources: list[TokenSource]
    """Validation splits that hold text; empty when there is none."""
    tokenizer: TextTokenizer | None
    """None when the data came without one; then there is no sample text and no bits per byte."""
    token_bytes_V: Tensor | None
    """UTF-8 bytes each token stands for, int64 [V]."""
    device: torch.device

    def evaluate(self, executor: Executor) -> list[Finding]:
        """Return scores over `evaluation.samples` held-out samples, and what the model writes after `evaluation.prompt`."""
        run, mesh, found = self.run, executor.mesh, []
        if self.sources:
            length, held_out = run.data.sequence_length, HeldOut(0.0, 0, 0)
            chosen = spread_samples(self.sources, length, run.evaluation.samples)
            for source, numbers in zip(self.sources, chosen, strict=True):
                held_out += score_split(
                    lambda batch: executor.evaluate(batch).sum(),
                    source,
                    vocab_size=run.model.vocab_size,
                    sequence_length=length,
                    device=self.device,
                    numbers=numbers,
                    microbatch=executor.layout.microbatch,
                    document_mask=run.data.document_mask,
                    # Of a source that comes without a tokenizer, nobody knows what text its tokens stand for.
                    byte_counts=None if source.tokenizer is None else self.token_bytes_V,
                    sharing=Sharing(mesh.data_rank, executor.layout.data_ranks, counts=mesh.reads_first),
                )
            found.append(Finding("evaluation", dict(held_out.as_dict()), str(held_out)))
        prompt = run.evaluation.prompt
        # Generation reads whole parameters and positions one by one, which only a rank alone has.
        if prompt is not None and self.tokenizer is not None and executor.layout.world_size == 1:
            model = executor.applied.stages[0].part
            ids = self.tokenizer.encode_prompt(prompt)
            room = min(run.evaluation.prompt_tokens, model.config.max_positions - len(ids))
            model.eval()
            tokens = list(generate_tokens(model, ids, max_tokens=room, temperature=0.0))
            model.train()
            text = self.tokenizer.decode(ids + tokens)[len(self.tokenizer.decode(ids)) :]
            shown = shorten_blank_lines(text)
            found.append(Finding("sample", {"prompt": prompt, "text": text}, f"sample: {prompt}{shown}"))
        return found
