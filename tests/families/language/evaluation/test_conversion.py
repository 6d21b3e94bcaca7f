"""Weights from one form into the other and back: nothing changes but the form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from phalanx.checkpoint import open_checkpoints, read_state
from phalanx.config.model import LanguageModel
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.language.evaluation.convert_weights import convert_weights
from phalanx.families.language.evaluation.load_weights import load_for_inference, open_weights
from small_models import FAMILIES, LLAMA, READER, byte_tokenizer, random_decoder, random_tokens, save_run
from small_transformers import huggingface_config, save_huggingface

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_exported_and_imported_again_has_the_same_weights(family: str, tmp_path: Path) -> None:
    decoder = random_decoder(FAMILIES[family])
    save_run(tmp_path / "run", decoder)
    out = convert_weights(tmp_path / "run", tmp_path / "hf")
    assert (out.form, out.dtype, out.tokenizer) == ("huggingface", "fp32", True)
    back = convert_weights(tmp_path / "hf", tmp_path / "back")
    assert (back.form, back.dtype, back.architecture, back.tokenizer) == ("phalanx", "fp32", None, True)
    with open_weights(tmp_path / "back") as weights:
        for name, parameter in decoder.named_parameters():
            assert torch.equal(weights.read(name), parameter), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = random_tokens(2, 50)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, decoder.logits(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mpt"])
def test_an_import_computes_the_same_and_exports_the_same_bytes(name: str, tmp_path: Path) -> None:
    theirs = save_huggingface(tmp_path / "hf", huggingface_config(name), max_shard_size="40KB")
    convert_weights(tmp_path / "hf", tmp_path / "ours")
    tokens = random_tokens(2, 50)
    with torch.no_grad():
        expected = theirs(tokens).logits
    for place in ("ours", "hf", "ours/checkpoints", "ours/checkpoints/step-00000000"):
        loaded = load_for_inference(tmp_path / place, CPU)
        torch.testing.assert_close(loaded.model.logits(tokens), expected, rtol=0, atol=1e-4)
    convert_weights(tmp_path / "ours", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    state = theirs.state_dict()
    tied = {"lm_head.weight"} if theirs.config.tie_word_embeddings else set()
    assert again.keys() == state.keys() - tied
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.items())


def test_an_import_is_a_checkpoint_that_training_can_start_from(tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", huggingface_config("llama", bos_token_id=5, eos_token_id=[7, 8]))
    convert_weights(tmp_path / "hf", tmp_path / "ours")
    newest = open_checkpoints(tmp_path / "ours").newest()
    assert newest is not None and newest.step == 0
    state = read_state(newest.path)
    assert state["step"] == 0
    assert state["weights_only"] is True
    assert state["special_tokens"] == {"bos_token_id": 5, "eos_token_id": [7, 8]}
    section = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())["model"]
    model = LanguageModel.model_validate(section)
    decoder = random_decoder(model)
    tensors = {f"model.{name}": parameter.data for name, parameter in decoder.named_parameters()}
    open_checkpoints(tmp_path / "ours").load(newest, tensors)
    with open_weights(tmp_path / "hf") as weights:
        assert all(torch.equal(weights.read(name), parameter) for name, parameter in decoder.named_parameters())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == ["checkpoints", "model.yaml"]


def test_half_precision_round_trip_is_exact(tmp_path: Path) -> None:
    config = huggingface_config("llama", dtype="bfloat16")
    save_huggingface(tmp_path / "full", config)
    convert_weights(tmp_path / "full", tmp_path / "hf", to="huggingface", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert convert_weights(tmp_path / "hf", tmp_path / "ours").dtype == "fp32"
    assert convert_weights(tmp_path / "ours", tmp_path / "again", dtype=torch.bfloat16).dtype == "bf16"
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, after[key]) for key, tensor in before.items())
    assert convert_weights(tmp_path / "hf", tmp_path / "small", dtype=torch.bfloat16).dtype == "bf16"
    with open_weights(tmp_path / "small") as weights:
        assert weights.widest_format() == torch.bfloat16
    assert convert_weights(tmp_path / "small", tmp_path / "kept").dtype == "bf16", "an export keeps the stored format"


def test_the_tokenizer_goes_along_and_transformers_loads_it(tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(READER))
    convert_weights(tmp_path / "run", tmp_path / "hf")
    ours, theirs = byte_tokenizer(), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "def naïve(x): return '<|endoftext|>'  # 🎉"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.model_max_length == 128
    convert_weights(tmp_path / "hf", tmp_path / "ours")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "ours" / "tokenizer" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_special_tokens_survive_the_round_trip(tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", huggingface_config("llama", bos_token_id=5, eos_token_id=[7, 8]))
    convert_weights(tmp_path / "hf", tmp_path / "ours")
    convert_weights(tmp_path / "ours", tmp_path / "again")
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / "again" / file).read_text())
        assert (fields["bos_token_id"], fields["eos_token_id"]) == (5, [7, 8])
    # What ends a text is said last in generation_config.json.
    (tmp_path / "again" / "generation_config.json").write_text('{"eos_token_id": 9}')
    with open_weights(tmp_path / "again") as weights:
        assert weights.tokenizer.special.as_config() == {"bos_token_id": 5, "eos_token_id": 9}


def test_another_tokenizer_can_be_given(tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(READER), tokenizer=False)
    assert not convert_weights(tmp_path / "run", tmp_path / "without").tokenizer
    file = tmp_path / "mine.json"
    byte_tokenizer().save(str(file))
    assert convert_weights(tmp_path / "run", tmp_path / "with", tokenizer=file).tokenizer
    assert (tmp_path / "with" / "tokenizer.json").read_bytes() == file.read_bytes()
    for wrong, reason in ((tmp_path / "no.json", "does not exist"), (tmp_path / "run", "holds no tokenizer.json")):
        with pytest.raises(CheckpointError, match=reason):
            convert_weights(tmp_path / "run", tmp_path / "x", tokenizer=wrong)
    assert not (tmp_path / "x").exists()


def test_a_model_without_counterpart_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(LLAMA.model_copy(update={"clip_qkv": 1.0})))
    with pytest.raises(ConfigError, match=r"model.clip_qkv=1.0 \(it has none\)"):
        convert_weights(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert convert_weights(tmp_path / "run", tmp_path / "copy", to="phalanx").form == "phalanx"


@pytest.mark.parametrize("form", ["huggingface", "phalanx"])
def test_a_used_folder_is_never_touched(form: Any, tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(LLAMA))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="used already exists and is not an empty folder"):
        convert_weights(tmp_path / "run", tmp_path / "used", to=form)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["notes"]


@pytest.mark.parametrize("form", ["huggingface", "phalanx"])
def test_a_damaged_source_leaves_no_target(form: Any, tmp_path: Path) -> None:
    save_run(tmp_path / "run", random_decoder(LLAMA))
    file = next((tmp_path / "run" / "checkpoints" / "step-00000010").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="checksum expected"):
        convert_weights(tmp_path / "run", tmp_path / "out", to=form)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_progress_reaches_the_whole(tmp_path: Path) -> None:
    save_huggingface(tmp_path / "hf", huggingface_config("llama"))
    seen: list[tuple[int, int]] = []
    convert_weights(tmp_path / "hf", tmp_path / "ours", progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.numel() for p in random_decoder(LLAMA).parameters())
