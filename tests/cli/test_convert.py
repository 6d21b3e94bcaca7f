"""`phalanx convert` as a person calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from small_models import GPT, LLAMA, READER, huggingface_config, random_decoder, save_huggingface, save_run

if TYPE_CHECKING:
    from conftest import Call


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
            "model.positions=rope makes this a LlamaForCausalLM in Hugging Face's terms, which has no counterpart for "
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
