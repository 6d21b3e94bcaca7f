"""`phalanx convert` as a person calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write
from safetensors.torch import load_file, save_file

from field_files import dataset
from phalanx.families.weather.config import WeatherModel
from published_climax import PublishedClimaX, published_state
from small_models import GPT, LLAMA, READER, random_decoder, save_run
from small_transformers import huggingface_config, save_huggingface
from token_data import write_token_folder

if TYPE_CHECKING:
    from command_line import Call

MACE_TORCH = Path(__file__).parents[1] / "families" / "materials" / "evaluation" / "mace_torch"


def test_there_and_back(call: Call, tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(READER))
    done = call("convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "bf16")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{tmp_path}/hf: Hugging Face folder (LlamaForCausalLM), 69.0K parameters, bf16\n"
    done = call("convert", str(tmp_path / "hf"), str(tmp_path / "back"))
    assert done.out.splitlines() == [
        f"{tmp_path}/back: Phalanx checkpoint, 69.0K parameters, fp32",
        f"train from it with training.init_from={tmp_path}/back and the model section in model.yaml",
    ]


def test_json_and_options(call: Call, tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(GPT), tokenizer=False)
    out = str(tmp_path / "hf")
    done = call("convert", str(tmp_path / "run"), out, "--to", "huggingface", "--shard-gb", "0.001", "--json")
    assert json.loads(done.out) == {
        "source": str(tmp_path / "run"),
        "target": out,
        "form": "huggingface",
        "architecture": "GPT2LMHeadModel",
        "parameters": sum(parameter.numel() for parameter in random_decoder(GPT).parameters()),
        "dtype": "fp32",
        "tokenizer": False,
    }
    done = call("convert", str(tmp_path / "run"), str(tmp_path / "other"))
    assert "no tokenizer went along: none was found; give one with --tokenizer" in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["RUN", "RUN"], 2, "RUN already exists and is not an empty folder; give another name, or remove it first"),
        (["RUN", "NEW", "--dtype", "int8"], 2, "--dtype=int8 must be fp64, fp32, bf16, fp16"),
        (
            ["RUN/nothing", "NEW"],
            1,
            "RUN/nothing is not a folder; give a run directory, a checkpoint in it, or a Hugging Face folder",
        ),
        (
            ["RUN", "NEW"],
            2,
            "LlamaForCausalLM, the architecture of Hugging Face nearest to this model, has no counterpart for "
            "model.clip_qkv=1.0 (it has none); such a model stays in Phalanx's own format",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    call: Call, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    save_run(tmp_path / "run", random_decoder(LLAMA.model_copy(update={"clip_qkv": 1.0})))

    def filled(text: str) -> str:
        return text.replace("RUN", str(tmp_path / "run")).replace("NEW", str(tmp_path / "new"))

    done = call("convert", *map(filled, arguments))
    assert (done.code, done.err) == (code, f"error: {filled(message)}\n")
    assert not (tmp_path / "new").exists()


def test_pickles_are_refused(call: Call, tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", huggingface_config("llama"))
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "pytorch_model.bin")
    done = call("convert", str(tmp_path / "hf"), str(tmp_path / "new"))
    assert done.code == 1
    assert done.err.startswith(f"error: {tmp_path}/hf/pytorch_model.bin is a pickle, which can run code")


def test_training_starts_from_an_import_as_the_guide_says(call: Call, tmp_path: Path) -> None:
    """One step at a vanishing learning rate leaves the held-out loss of the model that was imported."""
    data = write_token_folder(tmp_path / "data", train_tokens=5000)
    config = huggingface_config("llama", vocab_size=260, max_position_embeddings=32, rms_norm_eps=1e-4)
    save_huggingface(tmp_path / "hf", config)
    assert call("convert", str(tmp_path / "hf"), str(tmp_path / "ours")).code == 0
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        (tmp_path / "ours" / "model.yaml").read_text()
        + f"data: {{sources: [{data}], sequence_length: 32}}\n"
        + "layout: {global_batch: 4, precision: fp32}\n"
        + "optimizer: {lr: 1e-12}\n"
        + f"training: {{steps: 1, tensorboard: false, init_from: {tmp_path / 'ours'}}}\n"
    )
    trained = call("train", str(run_file), "--run-dir", str(tmp_path / "run"))
    assert trained.code == 0, trained.err
    losses = [
        json.loads(call("evaluate", str(tmp_path / name), "--data", str(data), "--device", "cpu", "--json").out)["loss"]
        for name in ("hf", "ours", "run")
    ]
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_moe", "Qwen3MoeForCausalLM"), ("gemma3", "Gemma3ForCausalLM")]
)
def test_newer_architectures_go_both_ways(call: Call, tmp_path: Path, name: str, architecture: str) -> None:
    save_huggingface(tmp_path / "hf", huggingface_config(name))
    assert call("convert", str(tmp_path / "hf"), str(tmp_path / "ours")).code == 0
    done = call("convert", str(tmp_path / "ours"), str(tmp_path / "again"), "--architecture", architecture)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{tmp_path}/again: Hugging Face folder ({architecture}), ")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    other = call("convert", str(tmp_path / "ours"), str(tmp_path / "x"), "--architecture", "LlamaForCausalLM")
    assert other.code == 2
    assert "LlamaForCausalLM, the architecture of Hugging Face asked for, has no counterpart for model." in other.err


def test_a_run_begins_with_weights_of_mace_torch(call: Call, tmp_path: Path) -> None:
    source, target = MACE_TORCH / "repulsive.safetensors", tmp_path / "own"
    done = call("convert", str(source), str(target))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{target}: Phalanx checkpoint of a MACE, 1.46K parameters, 3 elements, cutoff 4 A",
        f"train from it with phalanx train {target}/run.yaml, once its data.sources name your structures",
    ]
    structures = [Atoms("CO", [[0, 0, 0], [0, 0, 1.1 + 0.01 * number]]) for number in range(40)]
    for atoms in structures:
        atoms.calc = SinglePointCalculator(atoms, energy=-5.0 - atoms.positions[1, 2], forces=np.zeros((2, 3)))
    write(tmp_path / "main.extxyz", structures)
    fields = [f"data.sources.0.path={tmp_path}/main.extxyz", f"data.prepared={tmp_path}/graphs"]
    fields += ["data.validation_fraction=0.2", "data.test_fraction=0.2", "data.sources.0.check_units=false"]
    done = call("data", "prepare-graphs", str(target / "run.yaml"), *fields)
    assert done.code == 0, done.err
    fields += ["training.steps=2", "optimizer.warmup_steps=1", "training.tensorboard=false", "training.compile=false"]
    done = call("train", str(target / "run.yaml"), "--run-dir", str(tmp_path / "run"), *fields)
    assert done.code == 0, done.err
    assert re.search(r"head\.energy\.copies\.main\.0\.weight +taken", done.out + done.err)


def test_a_run_begins_with_weights_of_climax(call: Call, tmp_path: Path) -> None:
    source, target = tmp_path / "climax.safetensors", tmp_path / "own"
    names = ("orography", "z500", "t850", "u10")
    model = WeatherModel(n_layers=1, d_model=16, n_heads=4, n_lat=6, n_lon=8, patch_size=2, variables=names)
    save_file(published_state(PublishedClimaX(model)), source)
    done = call("convert", str(source), str(target), "--variables", ",".join(names), "--heads", "4", "--grid", "6x8")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{target}: Phalanx checkpoint of a ClimaX, 5.82K parameters, 4 variables on 6 x 8 points",
        f"train from it with phalanx train {target}/run.yaml, once its data.sources name your fields",
    ]
    dataset(np.arange(240) * 6).to_netcdf(tmp_path / "fields.nc")
    splits = "data.splits={train: {first: step 0, last: step 159}, test: {first: step 165, last: step 239}}"
    fields = [f"data.sources=[{tmp_path}/fields.nc]", "data.lead_hours=24", splits]
    done = call("forecast", str(target), "--hours", "24", "--starts", "2", "--device", "cpu", *fields)
    assert done.code == 0 and "u10" in done.out, done.err
    fields += ["training.steps=1", "optimizer.warmup_steps=1", "layout.global_batch=4"]
    fields += ["training.tensorboard=false", "training.compile=false"]
    done = call("train", str(target / "run.yaml"), "--run-dir", str(tmp_path / "run"), *fields)
    assert done.code == 0, done.err
    assert re.search(r"embedding\.aggregation\.queries +taken", done.out + done.err)


def test_options_of_climax_are_refused_for_other_models(call: Call, tmp_path: Path) -> None:
    done = call("convert", str(MACE_TORCH / "residual.safetensors"), str(tmp_path / "own"), "--heads", "4")
    assert done.code == 2 and "--heads counts for the state dict of a ClimaX alone" in done.err
    save_file({"net.var_query": torch.zeros(1, 1, 8)}, tmp_path / "climax.safetensors")
    done = call("convert", str(tmp_path / "climax.safetensors"), str(tmp_path / "own"), "--grid", "32 by 64")
    assert done.code == 2 and "--grid=32 by 64 must be ROWSxCOLUMNS" in done.err


def test_options_of_language_models_are_refused_for_mace_torch(call: Call, tmp_path: Path) -> None:
    source = str(MACE_TORCH / "residual.safetensors")
    done = call("convert", source, str(tmp_path / "own"), "--to", "huggingface")
    assert done.code == 2 and "--to counts for language models alone" in done.err
