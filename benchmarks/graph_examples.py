"""Errors of trained graph examples on their test splits, beside those of a plain guess, and a plate as the network sees it.

    phalanx data sample grains --out data/grains; phalanx data prepare-graphs examples/materials-grains.yaml
    phalanx train examples/materials-grains.yaml             # and the same of plate
    python benchmarks/graph_examples.py --out benchmarks/results/graphs/examples.json --draw docs/pictures

The guess knows no graph: for numbers the mean of the training split, for classes its most frequent one. Written are the
errors of both, and two drawings: errors as shares of the guess's, and stresses of the first plate of the test split.
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

from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_batches import Collator, GraphBatch
from phalanx.families.materials.data.graph_shards import Split, open_prepared, spread_evenly
from phalanx.families.materials.evaluation.network_predictions import load_network, split_errors
from phalanx.families.materials.inputs import columns_of
from phalanx.families.materials.model.losses import split_labels
from phalanx.families.materials.model_config import PROPERTY_LABELS
from phalanx.report.drawing import WIDTH, Bar, draw_bars, finish_drawing, make_circle, make_text

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SHADES = 12
"""Colours of stresses, from none to the largest."""


def main() -> None:
    """Measure both examples, write the result and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of materials-grains and materials-plate"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draw", type=Path, help="folder for drawings")
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/graph_examples.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "torch": metadata.version("torch"),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
    }
    for example in ("grains", "plate"):
        folder = asked.runs / f"materials-{example}"
        steps, found = load_network(folder, CPU).step, split_errors(folder, "test", CPU)[1].as_dict()
        guesses = guess(load_network(folder, CPU).run)
        rows = [{**row, "guess": guesses[row["quantity"]]} for row in found["errors"]]
        result[example] = {"steps": steps, "structures": found["structures"], "errors": rows}
        for row in rows:
            print(example, {name: row[name] for name in ("quantity", "mae", "rmse", "accuracy", "f1", "guess")})
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if asked.draw is not None:
        (asked.draw / "graph-errors.svg").write_text(draw_errors(result))
        (asked.draw / "graph-plate.svg").write_text(draw_plate(asked.runs / "materials-plate"))


def read_split(run: MaterialsRun, split: Split) -> GraphBatch:
    """Return all graphs of a split as one batch."""
    sources = open_prepared(run.data, split)
    found = spread_evenly(sources, None)
    return Collator(sources, columns_of(run, sources))(found, (len(found.numbers),))


def guess(run: MaterialsRun) -> dict[str, dict[str, float]]:
    """Return errors on the test split of the training split's mean, and of its most frequent class, by property."""
    training, test = read_split(run, "train"), read_split(run, "test")
    errors = {}
    for name, label in PROPERTY_LABELS.items():
        head = getattr(run.model, name)
        for column, quantity in enumerate(head.names if head else ()):
            known, truth = (getattr(batch, label)[:, column].double().numpy() for batch in (training, test))
            if quantity not in head.classes:
                missed = truth - known.mean()
                errors[quantity] = {"mae": float(np.abs(missed).mean()), "rmse": float(np.sqrt((missed**2).mean()))}
                continue
            share = float((truth == np.bincount(known.astype(int)).argmax()).mean())
            # Of classes that are never guessed F1 is 0.
            there = len(np.unique(truth))
            errors[quantity] = {"accuracy": share, "f1": 2.0 * share / (1.0 + share) / there}
    return errors


def draw_errors(result: dict[str, Any]) -> str:
    """Return the errors as bars, as shares of the guess's."""
    bars = []
    for example in ("grains", "plate"):
        for row in result[example]["errors"]:
            of_class = row["accuracy"] is not None
            share = (1.0 - row["f1"]) / (1.0 - row["guess"]["f1"]) if of_class else row["rmse"] / row["guess"]["rmse"]
            note = f"F1 {row['f1']:.3f}" if of_class else f"RMSE {row['rmse']:.3g}"
            bars.append(Bar(f"{example}: {row['quantity']}", share, note, "found", marks=(1.0,)))
    drawing = draw_bars(bars, "RMSE, and 1 - F1 of classes, as shares of a guess's that knows no graph (mark)")
    return _with_styles(
        str(drawing.svg), "text { font: 14px sans-serif } .mark { stroke: #999; stroke-width: 2 } .found { fill: #06c }"
    )


def draw_plate(run_dir: Path) -> str:
    """Return the nodes of a plate of the test split, coloured by von Mises stress: solved and predicted."""
    loaded = load_network(run_dir, CPU)
    batch = read_split(loaded.run, "test").take_graphs(0, 1)
    species_N, named = batch.inputs()
    with torch.no_grad():
        found = loaded.model.predict(species_N, forces=False, **split_labels(named)[1])
    head = loaded.run.model.atom_properties
    assert head is not None and batch.atom_properties_NP is not None and found.atom_properties_NP is not None
    # The plate's nodes have their place among their features.
    assert batch.node_features_NF is not None
    place = head.names.index("mises")
    truth, predicted = batch.atom_properties_NP[:, place], found.atom_properties_NP[:, head.columns[place]].squeeze(1)
    most, scale = float(truth.max()), WIDTH / 4.4
    parts = []
    for number, (words, values) in enumerate((("finite elements", truth), ("predicted", predicted))):
        left = 0.1 * scale + number * 2.2 * scale
        parts.append(make_text(left, 18, f"von Mises stress, {words}: largest {float(values.max()):.1f}"))
        for (x, y, *_), value in zip(batch.node_features_NF.tolist(), values.tolist(), strict=True):
            shade = min(max(int(SHADES * value / most), 0), SHADES - 1)
            parts.append(make_circle(left + scale * x, 40 + scale * (1.0 - y), 5, f"shade-{shade}", f"{value:.2f}"))
    drawing = finish_drawing(parts, 50 + scale, "Von Mises stress at the nodes of a plate, solved and predicted")
    shades = [f".shade-{one} {{ fill: hsl({240 - 240 * one // (SHADES - 1)} 80% 50%) }}" for one in range(SHADES)]
    return _with_styles(str(drawing.svg), "text { font: 14px sans-serif } " + " ".join(shades))


def _with_styles(svg: str, styles: str) -> str:
    """Return a drawing that is a file of its own."""
    start = svg.index(">") + 1
    opening = svg[:start].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return f"{opening}<style>{styles}</style>{svg[start:]}"


if __name__ == "__main__":
    main()
