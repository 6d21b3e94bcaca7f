"""Models of Phalanx in lm-evaluation-harness: `phalanx evaluate --harness`, and `PhalanxLM` for programs of one's own.

It needs the extra `harness` (lm-eval), so nothing imports it without need. Tasks and their data are those of the harness.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from phalanx.errors import ConfigError, nearest_names
from phalanx.families.language.evaluation.held_out import WHOLE, Sharing
from phalanx.families.language.evaluation.in_context import Candidate, HarnessScore, WholeModelScorer
from phalanx.families.language.evaluation.load_weights import LoadedModel

_GENERATED = 256
"""Tokens to write where a task does not say how many (the harness's own number)."""
Pair = tuple[tuple[str, str], list[int], list[int]]


class PhalanxLM(TemplateLM):
    """A loaded model as the harness asks for one: log-probabilities of continuations, and greedy text."""

    def __init__(self, loaded: LoadedModel, sharing: Sharing = WHOLE) -> None:
        """sharing: ranks that hold the whole model share batches and prompts; all of them ask, and all get every answer."""
        super().__init__()
        if loaded.tokenizer is None:
            raise ConfigError(f"{loaded.where} came without a tokenizer; give one with --tokenizer")
        self._tokenizer = loaded.tokenizer
        self._scorer = WholeModelScorer(loaded.model, loaded.tokenizer.special.end, sharing)
        self._positions = loaded.model.config.max_positions

    @property
    def eot_token_id(self) -> int:
        """Return the token that ends a document, or begins one where none ends it."""
        special = self._tokenizer.special
        found = [*special.end, *([] if special.begin is None else [special.begin])]
        if not found:
            raise ConfigError("the tokenizer has no token that ends or begins a document, which this task needs")
        return found[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, after the token that begins a document where the model was trained with one."""
        begins = self._tokenizer.special.begin is not None and add_special_tokens is not False
        return self._tokenizer.encode_prompt(string) if begins else self._tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        candidates = []
        for _texts, context, targets in requests:
            # The last token is a target alone, so one more than the positions fits.
            room = self._positions + 1 - len(targets)
            if room < 1:
                raise ConfigError(
                    f"a continuation of {len(targets)} tokens needs more than {self._positions} positions"
                )
            candidates.append(Candidate(tuple(context[-room:]), tuple(targets), 0))
        nats_N, greedy_N = self._scorer.score(candidates)
        return list(zip((-nats_N).tolist(), greedy_N.tolist(), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows of the model's positions."""
        sums = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self.eot_token_id, self._positions, 1
            )
            pairs: list[Pair] = [(("", ""), *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the likeliest text after each prompt, up to the first of its stop texts.

        Raises ConfigError for a task that wants drawn text."""
        # Prompts that end alike are written together, so that ranks can share them.
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(self._read_limits(request.args[1]), []).append(number)
        found = [""] * len(requests)
        for (limit, stops), numbers in alike.items():

            def has_stopped(written: Sequence[int], stops: tuple[str, ...] = stops) -> bool:
                text = self._tokenizer.decode(written)
                return any(stop in text for stop in stops)

            # Long prompts lose their beginning: what is asked stands at the end.
            prompts = [self.tok_encode(requests[number].args[0])[limit - self._positions :] for number in numbers]
            for number, written in zip(numbers, self._scorer.write(prompts, limit, has_stopped), strict=True):
                text = self._tokenizer.decode(written)
                found[number] = min((text.split(stop)[0] for stop in stops), key=len, default=text)
        return found

    def _read_limits(self, settings: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
        """Return the most tokens to write, and the texts that end an answer."""
        if settings.get("do_sample") and float(settings.get("temperature", 1.0)) > 0.0:
            raise ConfigError("only greedy text is generated for the harness; set do_sample: false in the task")
        until = settings.get("until") or []
        limit = int(settings.get("max_gen_toks", _GENERATED))
        if limit >= self._positions:
            raise ConfigError(f"max_gen_toks={limit} must be under the model's {self._positions} positions")
        return limit, tuple([until] if isinstance(until, str) else until)


def score_harness_tasks(
    loaded: LoadedModel,
    names: Sequence[str],
    *,
    folder: Path | None = None,
    shots: int | None = None,
    questions: int | None = None,
    sharing: Sharing = WHOLE,
) -> list[HarnessScore]:
    """Return the harness's scores of a model on tasks, groups or tags, on the first rank; an empty list on the others.

    folder: of further task files. shots, questions: see `score_tasks`; None asks as the tasks say. Raises ConfigError for a
    name that the harness does not know.
    """
    # Reading the harness's own thousands of files takes seconds: only where these tasks need any.
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=folder)
    unknown = next((name for name in names if not manager.match_tasks([name])), None)
    if unknown is not None:
        like = ", ".join(nearest_names(unknown, manager.all_tasks))
        raise ConfigError(
            f"--harness {unknown}: lm-evaluation-harness knows no such task; "
            + (f"names like it are {like}" if like else "lm-eval ls tasks lists all; own ones need --harness-tasks")
        )
    try:
        found = simple_evaluate(
            PhalanxLM(loaded, sharing),
            tasks=list(names),
            num_fewshot=shots,
            limit=questions,
            # Standard errors of some metrics would be drawn in processes forked of this one, which may hold a device.
            bootstrap_iters=0,
            log_samples=False,
            task_manager=manager,
        )
    except OSError as error:
        # It reads the tasks' data from the local cache of `datasets`, or downloads them.
        raise ConfigError(
            f"--harness {' '.join(names)}: {error}; fetch the data where there is a network, or name task files whose "
            "dataset_kwargs give local files with --harness-tasks"
        ) from error
    if found is None or sharing.rank != 0:
        return []
    scores = []
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        counted = found["n-samples"].get(task)
        for name, value in values.items():
            # Names are of a metric and of the filter that answers went through.
            metric = name.removesuffix(",none")
            if isinstance(value, float) and "_stderr" not in metric:
                scores.append(HarnessScore(task, metric, value, counted["effective"] if counted else None))
    return scores
