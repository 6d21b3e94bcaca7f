"""The Python interface: `import phalanx`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

ROOT = Path(__file__).parents[1]
_SCRIPT = """
import json, sys
from pathlib import Path

import phalanx

found = {"loaded": [name for name in ("torch", "numpy", "pydantic") if name in sys.modules]}
from own_model.family import FAMILY
found["torch for run files"] = "torch" in sys.modules
from own_model.data import Chirps, LossGap

phalanx.register(FAMILY)
phalanx.register(Chirps, "chirps")
phalanx.register(LossGap, "loss_gap")
# Paths may be strings.
run = phalanx.load_run(sys.argv[1], ["training.steps=3"])
phalanx.train(run, sys.argv[2])
folder = Path(sys.argv[2])
(evaluation,) = phalanx.evaluate(str(folder))
found["evaluation"] = evaluation.fields
found["logged"] = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
model = phalanx.load_model(str(folder))
found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
found["training"] = model.training
found["passed"] = phalanx.verify(run, 1, steps=1).verdicts[0].passed
found["dry ranks"] = phalanx.dryrun(run, 2, 1, device="cpu").rank
try:
    phalanx.register(FAMILY.run)
except phalanx.errors.PhalanxError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def test_every_name_is_there() -> None:
    for name in phalanx.__all__:
        assert getattr(phalanx, name).__doc__, name
        assert name in dir(phalanx)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = phalanx.absent


def test_a_program_trains_evaluates_and_loads(tmp_path: Path) -> None:
    """With a family, a data source and a callback that it registers itself."""
    example = ROOT / "examples" / "own_model"
    paths = os.pathsep.join((str(example), str(ROOT / "src")))
    command = [sys.executable, "-c", _SCRIPT, str(example / "run.yaml"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaded"] == [] and not found["torch for run files"]
    logged = [
        event for event in found["logged"] if event.get("event") == "evaluation" or event.get("kind") == "evaluation"
    ]
    assert found["evaluation"]["loss"] == pytest.approx(logged[-1]["loss"], rel=1e-6)
    assert found["parameters"] == 25_920 and found["training"] is False
    assert found["passed"] is True and found["dry ranks"] == 1
    assert "takes a Family" in found["refused"]
