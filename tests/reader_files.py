"""What readers of the guides have before them: run files, data, runs, a study and an ensemble, each as small as can be.

A folder for each family, with the names that its guides use, so that what they print runs there as it stands. `examples` are
those of the repository; `small` holds the ones that train, shrunk, to be laid over them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import ase
import ase.io
import numpy as np
import xarray
import yaml
from optuna.distributions import FloatDistribution
from safetensors.torch import save_file

from graph_files import write_set
from measured_runs import write_measured_runs
from phalanx.cli.main import run_command_line
from phalanx.config.load import dump_run, load_run
from phalanx.config.presets import load_preset
from phalanx.families.materials.data.samples.grains import write_grains
from phalanx.families.weather.config import WeatherModel, WeatherRun
from phalanx.planner.time.profile import default_profile, save_profile
from phalanx.study.hyperparameters.asha import rung_steps
from phalanx.study.hyperparameters.configuration import open_store, part_key, run_dir
from phalanx.study.hyperparameters.hyperparameter_space import build_hyperparameter_space
from phalanx.study.hyperparameters.tuner import describe_study
from phalanx.study.trial import OK, Outcome
from published_climax import PublishedClimaX, published_state
from small_models import READER, random_decoder, save_run
from small_transformers import huggingface_config, save_huggingface
from token_data import write_token_folder

ROOT = Path(__file__).parents[1]
STORES = ROOT / "tests" / "study" / "stores"
MACE_TORCH = Path(__file__).parent / "families" / "materials" / "evaluation" / "mace_torch" / "repulsive.safetensors"
_SHORT = (
    *("training.steps=4", "training.log_every=1", "training.tensorboard=false", "optimizer.warmup_steps=0"),
    *("checkpoint.every=null", "evaluation.every=null", "layout.precision=fp32"),
)
_TEXT = (
    *("model.n_layers=4", "model.d_model=32", "model.n_heads=4", "model.n_kv_heads=4", "model.vocab_size=264"),
    *(
        "training.steps=12",
        "model.max_positions=160",
        "data.sequence_length=32",
        "layout.global_batch=16",
        "evaluation.samples=2",
    ),
)
_WEATHER = (
    *("model.d_model=32", "model.n_layers=1", "model.n_heads=4", "layout.global_batch=4", "layout.microbatch=2"),
    "evaluation.samples=2",
)
_MATERIALS = (
    *("model.d_model=16", "model.n_layers=2", "layout.global_batch=8", "evaluation.samples=8"),
    *("data.validation_fraction=0.35", "data.test_fraction=0.35"),
)
_FIFTY_FRAMES = (
    "data.splits={train: {first: step 0, last: step 29}, validation: {first: step 36, last: step 55}, "
    "test: {first: step 62, last: step 89}}"
)
SMALLER: Mapping[str, tuple[str, ...]] = {
    "quickstart": (*_TEXT, "model.d_ff=64", "evaluation.prompt_tokens=4"),
    "moe-quickstart": (*_TEXT, "model.experts.d_ff=16", "evaluation.prompt_tokens=4"),
    "llama3-8b": (*_TEXT, "model.d_ff=64", "layout.recompute=selective"),
    "climax-small": (*_WEATHER, _FIFTY_FRAMES, "data.climatology_days=30"),
    "storm-1996": _WEATHER,
    "materials-xtb": _MATERIALS,
    "materials-three-sources": _MATERIALS,
    "materials-tune": _MATERIALS,
    "materials-grains": _MATERIALS,
}
"""Overrides that leave a model of the same kind of each example that the guides train."""
_STRUCTURES = 48
_OUTSIDE = (
    "data.sources=[{name: qm9, path: data/molecules/qm9_12k.npz, labels: {charges: {key: mulliken, unit: e}}}]",
    *("data.prepared=data/graphs/outside", "data.validation_fraction=0", "data.test_fraction=0"),
)
"""The file that a trained model is scored on in the guide to materials."""


def write_text_files(folder: Path) -> None:
    """Write what guides to language models name, and two trained runs."""
    _write_run_files(folder, ("quickstart", "moe-quickstart", "llama3-8b"))
    for name in ("text", "texts", "mytext", "books", "code", "python-stdlib"):
        write_token_folder(folder / "data" / name, train_tokens=20_000, validation_tokens=1_000)
    for name in ("texts", "TEXT..."):
        (folder / name).mkdir()
        (folder / name / "novel.txt").write_text("It was a dark and stormy night.\n" * 40)
    with gzip.open(folder / "more.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps({'text': f'Line {number} of many.'})}\n" for number in range(40))
    _train(folder, "small/quickstart.yaml", "runs/quickstart")
    for name in ("runs/mpt-1b", "runs/mpt-125m", "RUN_DIR"):
        shutil.copytree(folder / "runs" / "quickstart", folder / name)
    # Its clipped queries are what the guide's error is about.
    save_run(folder / "runs" / "a", random_decoder(READER.model_copy(update={"clip_qkv": 6.0})))
    _write_weights(folder)
    _call(folder, "data", "sample", "icl", "--out", "icl", "--questions", "2")
    shutil.copy(folder / "icl" / "which_module.jsonl", folder / "arc_easy.jsonl")
    task = "{label: modules, dataset_uri: arc_easy.jsonl, num_fewshot: [0], icl_task_type: multiple_choice}"
    (folder / "tasks.yaml").write_text(f"icl_tasks:\n- {task}\n")
    write_measured_runs(folder / "runs.csv", {}, {"row_id": "mine-2", "mbs": "4", "step_time_s": "0.018"})
    save_profile(folder / "h200-x4.profile.yaml", default_profile("H200"))
    shutil.copy(STORES / "search" / "run.search.log", folder)
    for name in ("a", "materials"):
        shutil.copytree(STORES / "tune", folder / "studies" / name)


def _write_weights(folder: Path) -> None:
    """Write a model as downloaded, the same converted, a run file that goes on from it, and a state dict of mace-torch."""
    shutil.copy(MACE_TORCH, folder / "mace.safetensors")
    save_huggingface(folder / "Llama-3.1-8B", huggingface_config("llama", vocab_size=264, max_position_embeddings=160))
    shutil.copy(folder / "data" / "text" / "tokenizer.json", folder / "Llama-3.1-8B")
    _call(folder, "convert", "Llama-3.1-8B/", "llama31/")
    run = yaml.safe_load((folder / "small" / "quickstart.yaml").read_text())
    run |= yaml.safe_load((folder / "llama31" / "model.yaml").read_text())
    (folder / "finetune.yaml").write_text(yaml.safe_dump(run))


def write_weather_files(folder: Path) -> None:
    """Write what guides to forecasters name, and a trained run."""
    climax = WeatherModel.model_validate(
        {**load_preset("climax").fields, "d_model": 16, "n_layers": 1, "n_lat": 4, "n_lon": 8}
    )
    save_file(published_state(PublishedClimaX(climax)), folder / "climax.safetensors")
    _write_run_files(folder, ("climax-small", "storm-1996"))
    (folder / "data" / "weather").mkdir(parents=True)
    for name, file, hours in (("climax-small", "weather", 12), ("storm-1996", "storm-1996", 6)):
        run = load_run(folder / "examples" / f"{name}.yaml")
        assert isinstance(run, WeatherRun)
        fields = _random_fields(run, hours)
        fields.to_netcdf(folder / "data" / "weather" / f"{file}.nc")
        if name == "climax-small":
            fields["time"].attrs["units"] = "hours since 2026-11-27 06:00"
            fields.to_netcdf(folder / "analysis.nc")
    _train(folder, "small/climax-small.yaml", "runs/climax-small")
    for name in ("runs/before", "RUN_DIR"):
        shutil.copytree(folder / "runs" / "climax-small", folder / name)


def write_materials_files(folder: Path) -> None:
    """Write what guides to materials models name: data, trained runs, a study, an ensemble, structures to label."""
    _write_run_files(folder, ("materials-xtb", "materials-three-sources", "materials-tune", "materials-grains"))
    write_grains(folder / "data" / "grains", polycrystals=_STRUCTURES // 2)
    molecules, copies = folder / "data" / "molecules", np.arange(_STRUCTURES)
    molecules.mkdir(parents=True)
    charges = write_set(molecules / "xtb_6k.npz", _STRUCTURES, qm9_index=copies)["charges"]
    props = np.random.default_rng(0).normal(size=(_STRUCTURES, 15))
    write_set(molecules / "qm9_12k.npz", _STRUCTURES, qm9_index=copies, mulliken=charges, props=props)
    write_set(molecules / "alloy_emt_1500.npz", _STRUCTURES, periodic=True)
    for name in ("xtb", "three-sources", "grains"):
        _call(folder, "data", "prepare-graphs", f"small/materials-{name}.yaml", "--workers", "1")
    # What the guide to ensembles chooses from: any prepared structures.
    shutil.copytree(folder / "data" / "graphs" / "three-sources" / "qm9", folder / "data" / "pool" / "candidates")
    for seed, name in enumerate(("materials-xtb", "a", "b", "c", "d")):
        _train(folder, "small/materials-xtb.yaml", f"runs/{name}", f"training.seed={seed}")
    _train(folder, "small/materials-grains.yaml", "runs/materials-grains")
    _call(folder, "data", "prepare-graphs", "runs/materials-xtb", *_OUTSIDE, "--workers", "1")
    _write_study(folder)
    grid = np.stack(np.meshgrid(*[np.arange(2)] * 3, indexing="ij"), -1).reshape(-1, 3) * 1.6
    random = np.random.default_rng(1)
    pool = [ase.Atoms(random.choice([6, 7, 8], 8), grid + random.uniform(-0.2, 0.2, grid.shape)) for _ in range(6)]
    (folder / "md").mkdir()
    ase.io.write(folder / "md" / "pool.extxyz", pool, format="extxyz")
    _call(folder, "ensemble", "runs/a", "runs/b", "--out", "ensembles/xtb")


def _write_run_files(folder: Path, names: Sequence[str]) -> None:
    """Copy the examples, shrink those of `names`, and give the first of these the names of a reader's own run file."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "small").mkdir()
    for name in names:
        run = load_run(folder / "examples" / f"{name}.yaml", [*_SHORT, *SMALLER[name]])
        (folder / "small" / f"{name}.yaml").write_text(dump_run(run))


def _random_fields(run: WeatherRun, step_hours: int) -> xarray.Dataset:
    """Return 90 frames of random fields that change slowly: every variable of a run, on its grid, as its source is read."""
    random = np.random.default_rng(0)
    model, data = run.model, run.data
    time = data.sources[0].time_dim or "time"
    walk = np.cumsum(random.normal(size=(len(data.inputs), 90, model.n_lat, model.n_lon)), axis=1, dtype=np.float32)
    fields = {name: ((time, "lat", "lon"), 250 + one) for name, one in zip(data.inputs, walk, strict=True)}
    still = {name: (("lat", "lon"), random.normal(size=(model.n_lat, model.n_lon))) for name in data.static}
    half = 90 / model.n_lat
    first, last = (model.first_latitude, model.last_latitude) if model.first_latitude else (half - 90, 90 - half)
    places = {"lat": np.linspace(first, last, model.n_lat), "lon": np.arange(model.n_lon) * 360 / model.n_lon}
    hours = (time, np.arange(90) * float(step_hours), {} if time != "time" else {"units": "hours since 2000-01-01"})
    return xarray.Dataset({**fields, **still}, {time: hours, **places})


def _write_study(folder: Path) -> None:
    """Write a study whose trials are the trained runs, with the scores that a tuner would have recorded."""
    study = folder / "studies" / "xtb"
    (study / "trials").mkdir(parents=True)
    shutil.copy(folder / "small" / "materials-tune.yaml", study / "run.yaml")
    run = load_run(study / "run.yaml")
    rungs = rung_steps(run.tune.asha, run.training.steps)
    store = open_store(study, describe_study(run, build_hyperparameter_space(run), rungs))
    ranges = {"optimizer.lr": FloatDistribution(1e-4, 1e-2, log=True)}
    for number, name in enumerate(("materials-xtb", "a", "b", "c", "d")):
        values = {"optimizer.lr": 1e-3 * (number + 1)}
        trial = store.claim(part_key(name, 0), values, ranges, sampler="random", limit_s=60.0)
        assert trial is not None
        shutil.copytree(folder / "runs" / name, run_dir(study, trial.number))
        store.finish(trial, Outcome(OK, 0.1 * (number + 1)))


def _train(folder: Path, run_file: str, run_dir: str, *words: str) -> None:
    _call(folder, "train", run_file, "--run-dir", run_dir, *words)


def _call(folder: Path, *words: str) -> None:
    with contextlib.chdir(folder):
        assert run_command_line(words) == 0
