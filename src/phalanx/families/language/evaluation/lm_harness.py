"""Models of Phalanx in lm-evaluation-harness: `lm_eval.simple_evaluate(model=PhalanxLM(loaded), tasks=[...])`.

Needs the extra `harness` (lm-eval). Nothing else imports this module; tasks and their data are the harness's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from phalanx.errors import ConfigError
from phalanx.families.language.evaluation.generation import generate_tokens
from phalanx.families.language.evaluation.in_context import Candidate, score_candidates
from phalanx.families.language.evaluation.load_weights import LoadedModel

_GENERATED = 256
"""Tokens to write where a task does not say how many (the harness's own number)."""
Pair = tuple[tuple[str, str], list[int], list[int]]


class PhalanxLM(TemplateLM):
    """A loaded model as the harness asks for one: log-probabilities of continuations, and greedy text."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        if loaded.tokenizer is None:
            raise ConfigError(f"{loaded.where} came without a tokenizer; load it with one")
        self._tokenizer, self._model = loaded.tokenizer, loaded.model
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
        nats_N, greedy_N = score_candidates(self._model, candidates)
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
        found = []
        for prompt, settings in (request.args for request in requests):
            if settings.get("do_sample") and float(settings.get("temperature", 1.0)) > 0.0:
                raise ConfigError("only greedy text is generated for the harness; set do_sample: false in the task")
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else list(until)
            limit = int(settings.get("max_gen_toks", _GENERATED))
            if limit >= self._positions:
                raise ConfigError(f"max_gen_toks={limit} must be under the model's {self._positions} positions")
            # Long prompts lose their beginning: what is asked stands at the end.
            ids, written, text = self.tok_encode(prompt)[limit - self._positions :], [], ""
            ends = self._tokenizer.special.end
            for token in generate_tokens(self._model, ids, max_tokens=limit, temperature=0.0, eod=ends):
                written.append(token)
                text = self._tokenizer.decode(written)
                if any(stop in text for stop in stops):
                    break
            found.append(min((text.split(stop)[0] for stop in stops), key=len, default=text))
        return found
