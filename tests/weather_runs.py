"""A weather run small enough for a test: three variables and orography on six by eight points, every 6 hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from field_files import dataset

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "family": "weather",
        "n_layers": 3,
        "d_model": 32,
        "n_heads": 4,
        "d_ff": 64,
        "n_lat": 6,
        "n_lon": 8,
        "patch_size": 2,
        "variables": ["z500", "t850", "u10", "orography"],
        "outputs": ["z500", "t850", "u10"],
        "qk_norm": True,
        "prediction": "change",
        "dropout": 0.1,
        "drop_path": 0.2,
    },
    "data": {
        "inputs": ["z500", "t850", "u10"],
        "static": ["orography"],
        "lead_hours": [6, 12, 24],
        "splits": {
            "train": {"first": "step 0", "last": "step 159"},
            "validation": {"first": "step 165", "last": "step 199"},
            "test": {"first": "step 205", "last": "step 239"},
        },
    },
    "layout": {"global_batch": 8, "microbatch": 1, "precision": "fp32"},
    "optimizer": {"lr": 0.003, "schedule": "constant"},
    "training": {"steps": 6, "tensorboard": False},
    "evaluation": {"samples": 12},
}


def write_weather_run(folder: Path, changes: dict[str, Any] | None = None, *, steps: int = 240) -> Path:
    """A run file in `folder` and the netCDF file it reads; `changes` replace `section.field`s."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "fields.nc"
    if not data.exists():
        dataset(np.arange(steps) * 6).to_netcdf(data)
    return write_run(folder, data, changes)


def write_run(folder: Path, source: Path, changes: dict[str, Any] | None = None) -> Path:
    """A run file in `folder` that reads `source`; `changes` replace `section.field`s."""
    sections = {name: dict(fields) for name, fields in SECTIONS.items()}
    sections["data"]["sources"] = [str(source)]
    for name, value in (changes or {}).items():
        section, field = name.split(".")
        sections[section][field] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path
