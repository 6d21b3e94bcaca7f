"""Coordinate check of muP: how much three steps change logits and activations, over widths, with and without it.

    python benchmarks/coordinate_check.py --out benchmarks/results/optimizers/coordinate_check.json

Is what `phalanx verify RUN --widths 128,256,512,1024` does, for a decoder of heads of 64 and an MLP of four times the width.
Beside the result, with the ending .svg, stand the curves of the logits (Yang et al., arXiv:2203.03466, appendix D.1).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from curves import Curve, describe_benchmark, draw_curves, write_result
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.evaluation.width_check import STEPS, check_widths

WIDTHS = (128, 256, 512, 1024)


def main() -> None:
    """Measure all widths, with muP and without, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=0.01)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"n_layers": 2, "d_model": 128, "n_heads": 2, "d_ff": 512, "vocab_size": 256, "max_positions": 64}
    run = LanguageRun.model_validate(
        {
            "model": shape,
            "data": {"sources": ["none"], "sequence_length": 64},
            "layout": {"global_batch": 4, "precision": "fp32"},
            "optimizer": {"lr": asked.lr, "schedule": "constant"},
            "training": {"steps": STEPS},
        }
    )
    found = check_widths(run, WIDTHS)
    write_result(asked.out, {**describe_benchmark(), **found.as_dict()})
    curves = [
        Curve(name, np.log2(WIDTHS).tolist(), parts["logits"], number)
        for number, (name, parts) in enumerate(found.changes.items())
    ]
    words = f"Change of the logits in {STEPS} steps over the width of the model"
    svg = draw_curves(curves, words, "width", logarithmic=(False, True), label=lambda power: f"{2**power:.0f}")
    asked.out.with_suffix(".svg").write_text(svg)
    print(json.dumps(found.growth))


if __name__ == "__main__":
    main()
