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
from phalanx.families.language.huggingface.checkpoint_folder import HuggingFaceFolder
from phalanx.families.language.huggingface.export_folder import Export, write_folder
from phalanx.families.language.huggingface.find_architecture import architecture_for
from phalanx.families.language.huggingface.folder_files import TokenizerFiles
from small_models import FAMILIES, LLAMA, random_decoder
from small_transformers import huggingface_config, save_huggingface


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
            "those that are: LlamaForCausalLM, GPT2LMHeadModel, MptForCausalLM, ",
        ),
        (
            {"hidden_act": "relu"},
            "FOLDER/config.json: hidden_act='relu' has no counterpart in the decoder: Input should be 'silu' or 'swish'",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "FOLDER/config.json: rope_parameters.rope_type='longrope' has no counterpart in the decoder: "
            "Input should be 'default', 'linear', 'llama3' or 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 8.0}},
            "FOLDER/config.json: rope_parameters={'rope_type': 'linear', 'factor': 2.0, 'beta_fast': 8.0} has no "
            "counterpart in the decoder: beta_fast=8.0 has no effect with rope_type linear; take it out",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 16,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                }
            },
            "FOLDER/config.json: rope_scaling.mscale_all_dim=0.5 has no counterpart in this architecture",
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
            {"num_hidden_layers": 9_999},
            "FOLDER: config.json asks for 9999 layers, but the weight files hold 21 tensors",
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
            "Qwen3ForCausalLM, the architecture of Hugging Face nearest to this model, has no counterpart for "
            "model.norm=layernorm (it has rmsnorm); "
            "such a model stays in Phalanx's own format",
        ),
        (
            FAMILIES["gpt"].model_copy(update={"bias": False, "n_kv_heads": 2}),
            "GPT2LMHeadModel, the architecture of Hugging Face nearest to this model, has no counterpart for "
            "model.bias=false (it has true); model.n_kv_heads=2 (it has 6); such a model stays in Phalanx's own format",
        ),
        (
            FAMILIES["mpt"].model_copy(update={"mlp": "gelu_tanh", "d_ff": 100, "alibi_bias_max": 16.0}),
            "MptForCausalLM, the architecture of Hugging Face nearest to this model, has no counterpart for "
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
    export = Export(**plan, read=lambda name, rows: weights[name][rows], tokenizer=TokenizerFiles())
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="used already exists and is not an empty folder; give another name"):
        write_folder(tmp_path / "used", export)

    def fail_late(name: str, rows: slice) -> torch.Tensor:
        if name == "head.weight":
            raise CheckpointError("cannot be read")
        return weights[name][rows]

    with pytest.raises(CheckpointError):
        write_folder(tmp_path / "out", Export(**plan, read=fail_late, tokenizer=TokenizerFiles()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["used"]
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", export)
    HuggingFaceFolder(tmp_path / "out").close()


def test_a_head_beside_a_tied_one_is_compared_with_the_embedding(tmp_path: Path) -> None:
    """transformers computes with a head of its own that the file holds, whatever tie_word_embeddings says."""
    save_huggingface(tmp_path / "model", huggingface_config("llama", tie_word_embeddings=True))
    folder = tmp_path / "model"
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, **{"lm_head.weight": embedding.clone()})
    HuggingFaceFolder(folder).close()

    other = embedding.clone()
    other[-1, -1] += 0.5
    for head in (other, torch.ones(3)):
        change_tensors(folder, **{"lm_head.weight": head})
        assert refusal(folder) == (
            "FOLDER: config.json says tie_word_embeddings=true (or leaves it so), but lm_head.weight differs from "
            "model.embed_tokens.weight; to use both, set tie_word_embeddings to false in config.json"
        )
    change_tensors(folder, **{"lm_head.weight": other})
    change_config(folder, tie_word_embeddings=False)
    with HuggingFaceFolder(folder) as untied:
        assert torch.equal(untied.read("head.weight"), other)


def test_a_model_type_of_another_architecture_is_refused(folder: Path) -> None:
    change_config(folder, model_type="mistral", sliding_window=8)
    assert refusal(folder) == (
        "FOLDER/config.json: architectures=['LlamaForCausalLM'] is a model of type llama, but model_type=mistral, by "
        "which transformers chooses what it computes; correct the one that is wrong"
    )


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama", {"sliding_window": 8}, "sliding_window=8"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads={'0': [1]}"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2]}},
            "rope_parameters.mrope_section=[2, 2]",
        ),
        ("gpt2", {"alibi": True}, "alibi=True"),
        ("mpt", {"attn_config": {"attn_uses_sequence_id": True}}, "attn_config.attn_uses_sequence_id=True"),
        ("mpt", {"attn_config": {"kv_n_heads": 2}}, "attn_config.kv_n_heads=2"),
        ("mpt", {"block_overrides": {"order": [1]}}, "block_overrides={'order': [1]}"),
        ("mpt", {"ffn_config": {"ffn_type": "mptmlp", "ffn_act_fn": "relu"}}, "ffn_config.ffn_act_fn='relu'"),
    ],
)
def test_keys_that_nobody_knows_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], key: str
) -> None:
    save_huggingface(tmp_path, huggingface_config(name))
    change_config(tmp_path, **changes)
    assert refusal(tmp_path) == (
        f"FOLDER/config.json: {key} has no counterpart in the decoder: "
        f"what it changes is not known; if it is nothing, take it out of config.json"
    )


def test_a_window_of_mpt_is_refused_and_a_window_without_bounds_is_read(tmp_path: Path) -> None:
    save_huggingface(tmp_path, huggingface_config("mpt"))
    change_config(tmp_path, attn_config={"sliding_window_size": 8})
    assert "attn_config.sliding_window_size=8 has no counterpart in the decoder" in refusal(tmp_path)
    change_config(tmp_path, attn_config={"sliding_window_size": -1})
    HuggingFaceFolder(tmp_path).close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mpt"])
def test_keys_that_change_nothing_are_passed_over(tmp_path: Path, name: str) -> None:
    save_huggingface(tmp_path, huggingface_config(name))
    change_config(
        tmp_path, initializer_range=0.5, temperature=0.7, torch_dtype="bfloat16", unheard_of=None, a_switch=False
    )
    HuggingFaceFolder(tmp_path).close()


def test_the_configuration_that_llm_foundry_writes_is_read(tmp_path: Path) -> None:
    save_huggingface(tmp_path, huggingface_config("mpt"))
    foundry = {
        "architectures": ["MPTForCausalLM"],
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "flash",
            "attn_logit_softcapping": None,
            "attn_pdrop": 0.0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": 6,
            "fused_qkv": True,
            "kv_dim": None,
            "nope": False,
            "prefix_lm": False,
            "qk_gn": False,
            "qk_ln": False,
            "rope": False,
            "rope_dail_config": {"type": "original", "pos_idx_in_fp32": True, "xpos_scale_base": 512},
            "rope_hf_config": {"type": "no_scaling", "factor": 1.0},
            "rope_impl": "dail",
            "rope_theta": 10000,
            "sliding_window_size": -1,
            "softmax_scale": None,
        },
        "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
        "d_model": 48,
        "emb_pdrop": 0.0,
        "embedding_fraction": 1.0,
        "expansion_ratio": 4,
        "fc_type": "torch",
        "ffn_config": {"fc_type": "torch", "ffn_type": "mptmlp"},
        "init_config": {"name": "kaiming_normal_", "init_div_is_residual": True},
        "init_device": "cpu",
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 64,
        "model_type": "mpt",
        "n_heads": 6,
        "n_layers": 2,
        "no_bias": True,
        "norm_eps": 1e-4,
        "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
        "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "use_cache": False,
        "use_pad_tok_in_ffn": True,
        "verbose": 0,
        "vocab_size": 97,
    }
    (tmp_path / "config.json").write_text(json.dumps(foundry))
    with HuggingFaceFolder(tmp_path) as read:
        assert read.architecture.name == "MptForCausalLM"
        assert read.model == FAMILIES["mpt"].model_copy(
            update={"clip_qkv": 6.0, "norm_eps": 1e-4, "n_kv_heads": None, "alibi_bias_max": 8.0}
        ), read.model


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(folder: Path, value: float) -> None:
    weight = load_file(folder / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    weight[3, 5] = value
    change_tensors(folder, **{"model.layers.1.self_attn.k_proj.weight": weight})
    with HuggingFaceFolder(folder) as opened:
        opened.read("blocks.0.attention.qkv.weight")
        with pytest.raises(
            CheckpointError, match=r"1 of 768 numbers of tensor model.layers.1.self_attn.k_proj.weight are"
        ):
            opened.read("blocks.1.attention.qkv.weight")
