"""Coordinate check of muP: how much a few steps change a decoder's outputs, over widths, with and without it.

Under muP the change is of the same size at every width; otherwise it grows, and a rate that suits one width is too large for
wider ones (Yang et al., arXiv:2203.03466, appendix D.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx.config.model import LanguageModel
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.language.decoder import Decoder
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.positions import Positions
from phalanx.training.step import build_step

STEPS = 3
FLAT = 0.4
"""Largest growth of the logits' change, as an exponent of the width, that counts as none: of few steps it is near 0."""
_SAMPLES, _LENGTH, _VOCABULARY, _LAYERS = 4, 64, 256, 2


@dataclass(frozen=True)
class WidthCheck:
    """What the steps changed of the outputs of a decoder at each width, as root mean squares."""

    lr: float
    widths: tuple[int, ...]
    changes: dict[str, dict[str, list[float]]]
    """By parametrisation (muP, usual) and output (logits, hidden), a number a width."""

    @property
    def growth(self) -> dict[str, dict[str, float]]:
        """Exponent of the width with which each change grows."""
        return {
            name: {part: float(np.polyfit(np.log(self.widths), np.log(values), 1)[0]) for part, values in found.items()}
            for name, found in self.changes.items()
        }

    @property
    def passed(self) -> bool:
        """Whether the logits' change under muP does not depend on the width."""
        return abs(self.growth["muP"]["logits"]) <= FLAT

    def as_dict(self) -> dict[str, object]:
        """Return the check as JSON values."""
        return {
            "steps": STEPS,
            "lr": self.lr,
            "widths": list(self.widths),
            "changes": self.changes,
            "growth": self.growth,
            "passed": self.passed,
        }


def check_widths(run: LanguageRun, widths: Sequence[int]) -> WidthCheck:
    """Train small decoders of the run's kind at each width for `STEPS` steps, on the CPU in float32, and compare them.

    The first width is the base of muP. Heads keep their size, and the MLP its hidden width over the model's; layers, tokens
    and samples are few. Raises ConfigError for widths that no such decoder has, and for fewer than three.
    """
    if len(widths) < 3 or list(widths) != sorted(set(widths)):
        raise ConfigError(
            f"--widths {','.join(map(str, widths))}: give three widths or more, each larger than the last"
        )
    changes: dict[str, dict[str, list[float]]] = {}
    for name, base in (("muP", widths[0]), ("usual", None)):
        found = [_measure(_resize(run, width, base)) for width in widths]
        changes[name] = {part: [one[part] for one in found] for part in found[0]}
    return WidthCheck(run.optimizer.lr, tuple(widths), changes)


def _resize(run: LanguageRun, width: int, base: int | None) -> LanguageRun:
    """Return a small run whose model has this width. base: of muP; None is without it."""
    model, size = run.model, run.model.head_size
    share = model.n_heads // model.kv_heads
    if width % (size * share) or width < size * share:
        raise ConfigError(f"--widths {width}: heads of {size} in groups of {share} need a multiple of {size * share}")
    heads = width // size
    shape = {
        "n_layers": min(_LAYERS, model.n_layers),
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": heads // share,
        "head_dim": size,
        "d_ff": model.ff_size * width // model.d_model,
        "vocab_size": _VOCABULARY,
        "max_positions": _LENGTH,
        "mup_base_width": base,
        "tied_head": False,
        "dropout": 0.0,
        # A window would be longer than the samples.
        "sliding_window": None,
        "global_every": 0,
        "local_rope_theta": None,
    }
    changed = LanguageModel.model_validate({**model.model_dump(), **shape})
    layout = run.layout.model_copy(update={"global_batch": _SAMPLES, "microbatch": _SAMPLES, "precision": "fp32"})
    optimizer = run.optimizer.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    data = run.data.model_copy(update={"sequence_length": _LENGTH})
    return run.model_copy(update={"model": changed, "layout": layout, "optimizer": optimizer, "data": data})


def _measure(run: LanguageRun) -> dict[str, float]:
    """Return what the steps change, as root mean squares."""
    cpu = torch.device("cpu")
    layout = ResolvedLayout(_SAMPLES, microbatch=_SAMPLES)
    bound = bind(run, LayoutModel)
    applied = apply_layout(bound, layout, ONE_RANK, cpu, AttentionChoice("sdpa"))
    step, model = build_step(bound, applied, cpu), applied.stages[0].part
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(run.training.seed)
    tokens = torch.randint(_VOCABULARY, (_SAMPLES, _LENGTH + 1), generator=generator)
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], None, torch.arange(_SAMPLES))
    before = _outputs(model, batch.tokens)
    for number in range(1, STEPS + 1):
        step.run(number, batch)
    after = _outputs(model, batch.tokens)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


@torch.no_grad()
def _outputs(model: Decoder, tokens_BS: Tensor) -> dict[str, Tensor]:
    """Return the logits and the residual stream behind the last block."""
    positions_S = torch.arange(tokens_BS.shape[1])
    hidden = model.hidden(tokens_BS, Positions(positions_S, positions_S))
    return {"logits": model.logits(tokens_BS), "hidden": hidden}
