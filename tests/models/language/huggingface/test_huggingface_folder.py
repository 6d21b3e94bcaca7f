"""What is refused when a folder is read or written, and the message a person sees."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.config.model import LanguageModel
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models.language.huggingface.architectures import architecture_for
from phalanx.models.language.huggingface.read import HuggingFaceFolder
from phalanx.models.language.huggingface.tokens import TokenizerFiles
from phalanx.models.language.huggingface.write import Export, write_folder
from small_models import FAMILIES, LLAMA, huggingface_config, random_decoder, save_huggingface


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_huggingface(tmp_path / "model", huggingface_config("llama"))
    return tmp_path / "model"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        HuggingFaceFolder(folder)
    return str(raised.value).replace(str(folder), "FOLDER")


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def split_with_index(folder: Path, file_name: str) -> None:
    """Keep the weights in one file, under a name that an index gives."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(names, file_name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["BertModel"], "model_type": "bert"},
            "FOLDER/config.json: architectures=['BertModel'] model_type=bert is not read; "
            "those that are: LlamaForCausalLM, GPT2LMHeadModel, MptForCausalLM",
        ),
        (
            {"hidden_act": "relu"},
            "FOLDER/config.json: hidden_act='relu' has no counterpart in the decoder: Input should be 'silu' or 'swish'",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "FOLDER/config.json: rope_parameters.rope_type='yarn' has no counterpart in the decoder: "
            "Input should be 'default' or 'llama3'",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
            "FOLDER/config.json: rope_parameters={'rope_type': 'llama3', 'factor': 2.0} has no counterpart in the "
            "decoder: rope_type llama3 needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        (
            {"attention_bias": True},
            "FOLDER/config.json: attention_bias=True and mlp_bias=False differ; the decoder has both or neither",
        ),
        ({"num_attention_heads": 5, "head_dim": None}, "FOLDER/config.json: n_heads=5 does not divide d_model=48"),
        ({"quantization_config": {"bits": 4}}, "FOLDER/config.json: quantization_config is set; only unquantised"),
        (
            {"num_hidden_layers": 10_000_000},
            "FOLDER: config.json asks for 10000000 layers, but the weight files hold 21 tensors",
        ),
        ({"hidden_size": 10**30}, "FOLDER/config.json: hidden_size=1000000000000000000000000000000 has no counterpart"),
    ],
)
def test_configurations_that_do_not_fit(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    assert refusal(folder).startswith(message)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attn_config": {"qk_ln": True}}, "attn_config.qk_ln=True"),
        ({"attn_config": {"alibi": False}}, "attn_config.alibi=False"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_config.attn_type='multiquery_attention'"),
        ({"expansion_ratio": 8}, "expansion_ratio=8"),
        ({"no_bias": False}, "no_bias=False"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
    ],
)
def test_mpt_settings_without_a_counterpart_are_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    save_huggingface(tmp_path, huggingface_config("mpt"))
    change_config(tmp_path, **changes)
    assert f"{field} has no counterpart in the decoder" in refusal(tmp_path)


def test_mpt_softmax_scale_other_than_the_usual_one_is_refused(tmp_path: Path) -> None:
    save_huggingface(tmp_path, huggingface_config("mpt"))
    change_config(tmp_path, attn_config={"softmax_scale": 0.1})
    assert "attn_config.softmax_scale=0.1 is not the decoder's 1/sqrt(head size) = 0.353553" in refusal(tmp_path)
    change_config(tmp_path, attn_config={"softmax_scale": 8**-0.5})
    HuggingFaceFolder(tmp_path).close()


def test_missing_unknown_and_misshapen_tensors_are_named_one_a_line(folder: Path) -> None:
    change_tensors(
        folder,
        **{
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.mlp.experts.weight": torch.ones(3),
            "model.norm.weight": torch.ones(47),
            "lm_head.weight": torch.ones(97, 48, dtype=torch.int8),
        },
    )
    assert refusal(folder).splitlines() == [
        "FOLDER: tensor model.layers.1.mlp.up_proj.weight is missing",
        "FOLDER: tensor lm_head.weight is stored as I8; read are F64, F32, F16, BF16",
        "FOLDER: LlamaForCausalLM has no tensor model.layers.0.mlp.experts.weight",
        "FOLDER: tensor model.norm.weight has shape [47], config.json asks for [48]",
    ]


def test_a_long_list_of_problems_is_cut(folder: Path) -> None:
    change_config(folder, hidden_size=96, head_dim=8)
    lines = refusal(folder).splitlines()
    assert len(lines) == 6
    assert lines[-1] == "... and 16 more"


def test_pickles_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(folder) == (
        "FOLDER/pytorch_model.bin is a pickle, which can run code when it is read, so it is not; "
        "save the model as safetensors (transformers: model.save_pretrained(folder)) and give that folder"
    )


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == ("FOLDER holds no weights: neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "a/../../x", "..", ""])
def test_an_index_may_not_lead_out_of_the_folder(folder: Path, name: str) -> None:
    split_with_index(folder, name)
    assert refusal(folder) == f"FOLDER: the file name {name!r} leads out of the folder; refused"


def test_an_index_that_names_a_missing_file(folder: Path) -> None:
    split_with_index(folder, "weights-2.safetensors")
    assert refusal(folder) == "FOLDER/weights-2.safetensors is missing"


def test_an_index_without_a_table(folder: Path) -> None:
    split_with_index(folder, "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["weights.safetensors"]}')
    assert refusal(folder) == "FOLDER/model.safetensors.index.json: weight_map is missing or not a table of file names"
    (folder / "model.safetensors.index.json").write_text("[" * 100_000)
    assert refusal(folder).startswith("FOLDER/model.safetensors.index.json is not readable JSON")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_out_of_the_folder_are_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "elsewhere"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    assert refusal(folder) == f"FOLDER/{name} is a link that leads out of the folder, to {outside}; refused"


def test_links_within_the_folder_are_followed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    HuggingFaceFolder(folder).close()


def test_a_snapshot_in_the_download_cache_is_read(folder: Path) -> None:
    snapshot = folder.parent / "models--a--b" / "snapshots" / "0123"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", file.name))
    HuggingFaceFolder(snapshot).close()


def test_a_truncated_weight_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(folder).startswith("FOLDER/model.safetensors is not a whole safetensors file: ")


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    split_with_index(folder, "weights.safetensors")
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "z.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "z.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(folder) == "FOLDER/z.safetensors: tensor model.norm.weight is in another weight file as well"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            LLAMA.model_copy(update={"norm": "layernorm", "qk_norm": True}),
            "model.positions=rope makes this a LlamaForCausalLM in Hugging Face's terms, which has no counterpart for "
            "model.norm=layernorm (it has rmsnorm); model.qk_norm=true (it has false); "
            "such a model stays in Phalanx's own format",
        ),
        (
            FAMILIES["gpt"].model_copy(update={"bias": False, "n_kv_heads": 2}),
            "model.positions=learned makes this a GPT2LMHeadModel in Hugging Face's terms, which has no counterpart for "
            "model.bias=false (it has true); model.n_kv_heads=2 (it has 6); such a model stays in Phalanx's own format",
        ),
        (
            FAMILIES["mpt"].model_copy(update={"mlp": "gelu_tanh", "d_ff": 100, "alibi_bias_max": 16.0}),
            "model.positions=alibi makes this a MptForCausalLM in Hugging Face's terms, which has no counterpart for "
            "model.mlp=gelu_tanh (it has gelu); model.d_ff=100 (it has 192); model.alibi_bias_max=16.0 (it has 8.0); "
            "such a model stays in Phalanx's own format",
        ),
    ],
)
def test_shapes_without_an_architecture_are_named_field_by_field(model: LanguageModel, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        architecture_for(model)
    assert str(raised.value) == message


def test_an_export_never_overwrites_and_never_stays_half_written(tmp_path: Path) -> None:
    weights = random_decoder(LLAMA).state_dict()
    plan = {"model": LLAMA, "architecture": architecture_for(LLAMA), "dtype": torch.float32}
    export = Export(**plan, read=weights.__getitem__, tokenizer=TokenizerFiles())
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="used already exists and is not an empty folder; give another name"):
        write_folder(tmp_path / "used", export)

    def fail_late(name: str) -> torch.Tensor:
        if name == "head.weight":
            raise CheckpointError("cannot be read")
        return weights[name]

    with pytest.raises(CheckpointError):
        write_folder(tmp_path / "out", Export(**plan, read=fail_late, tokenizer=TokenizerFiles()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", export)
    HuggingFaceFolder(tmp_path / "out").close()
