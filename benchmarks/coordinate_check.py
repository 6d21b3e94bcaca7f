"""Coordinate check of muP: how much three steps change logits and activations, over widths, with and without it.

    python benchmarks/coordinate_check.py --out benchmarks/results/optimizers/coordinate_check.json

Trains a small decoder of each width for three steps of AdamW on the same random tokens, on the CPU in float32, and notes the
root mean square of what changes of the logits and of the residual stream behind the last block. Beside the result, with the
ending .svg, stand the curves of the logits (Yang et al., arXiv:2203.03466, appendix D.1).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.registry import bind
from phalanx.layout.apply import apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.positions import Positions
from phalanx.report.drawing import Plot, Scale, fit_scale
from phalanx.training.step import build_step

ROOT = Path(__file__).parents[1]
WIDTHS = (128, 256, 512, 1024)
STEPS = 3
COLOURS = {"muP": "#06c", "usual": "#c44"}


def main() -> None:
    """Measure all widths, with muP and without, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=0.01)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    changes = {
        name: {width: measure(width, base, asked.lr) for width in WIDTHS}
        for name, base in (("muP", WIDTHS[0]), ("usual", None))
    }
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"torch": metadata.version("torch"), "python": platform.python_version()},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
        "lr": asked.lr,
        "steps": STEPS,
        "base_width": WIDTHS[0],
        "changes": changes,
        "growth": {
            name: {part: growth(found, part) for part in ("logits", "hidden")} for name, found in changes.items()
        },
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    asked.out.with_suffix(".svg").write_text(draw(changes))
    print(json.dumps(result["growth"]))


def measure(width: int, base: int | None, lr: float) -> dict[str, float]:
    """Return what the steps change of a decoder of this width. base: where muP changes nothing; None is without it."""
    heads = width // 64
    shape = {"n_layers": 2, "d_model": width, "n_heads": heads, "d_ff": 4 * width, "vocab_size": 256}
    run = LanguageRun.model_validate(
        {
            "model": {**shape, "max_positions": 64, "mup_base_width": base},
            "data": {"sources": ["none"], "sequence_length": 64},
            "layout": {"global_batch": 4, "precision": "fp32"},
            "optimizer": {"lr": lr, "schedule": "constant"},
            "training": {"steps": STEPS},
        }
    )
    cpu, layout = torch.device("cpu"), ResolvedLayout(4, microbatch=4)
    applied = apply_layout(bind(run, LayoutModel), layout, ONE_RANK, cpu, AttentionChoice("sdpa"))
    step, model = build_step(bind(run), applied, cpu), applied.stages[0].part
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], None, torch.arange(4))
    before = look(model, batch.tokens)
    for number in range(1, STEPS + 1):
        step.run(number, batch)
    after = look(model, batch.tokens)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


@torch.no_grad()
def look(model: Any, tokens_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logits and the residual stream behind the last block."""
    positions_S = torch.arange(tokens_BS.shape[1])
    hidden = model.hidden(tokens_BS, Positions(positions_S, positions_S))
    return {"logits": model.logits(tokens_BS), "hidden": hidden}


def growth(changes: dict[int, dict[str, float]], part: str) -> float:
    """Return the exponent with which a change grows with the width."""
    values = [found[part] for found in changes.values()]
    return float(np.polyfit(np.log(list(changes)), np.log(values), 1)[0])


def draw(changes: dict[str, dict[int, dict[str, float]]]) -> str:
    """Return the change of the logits over widths as an SVG image, both scales logarithmic."""
    curves = {name: [one["logits"] for one in found.values()] for name, found in changes.items()}
    values = np.asarray([value for curve in curves.values() for value in curve])
    across = Scale(float(np.log2(WIDTHS[0])), float(np.log2(WIDTHS[-1])))
    plot = Plot(across, fit_scale(values, logarithmic=True))
    plot.label_up()
    plot.label_across(np.log2(WIDTHS).tolist(), lambda value: f"width {2**value:.0f}")
    for name, curve in curves.items():
        plot.add_line(np.log2(WIDTHS).tolist(), curve, name)
    styles = [f".{name} {{ fill: none; stroke: {colour}; stroke-width: 2 }}" for name, colour in COLOURS.items()]
    keys = [
        f'<text x="110" y="{30 + 22 * place}" style="fill: {colour}">{name}</text>'
        for place, (name, colour) in enumerate(COLOURS.items())
    ]
    head = "<style>text { font: 14px sans-serif } .grid { stroke: #ddd } " + " ".join(styles) + "</style>"
    svg = str(plot.finish(f"Change of the logits in {STEPS} steps over the width of the model").svg)
    start = svg.index(">") + 1
    opening = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return f"{opening}{head}{''.join(keys)}{svg[start:]}\n"


if __name__ == "__main__":
    main()
