"""Imported models compute what `transformers` computes, and exported ones compute what we do; weights survive exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from phalanx.config.model import LanguageModel
from phalanx.families.language.decoder import Decoder
from phalanx.families.language.huggingface.checkpoint_folder import HuggingFaceFolder
from phalanx.families.language.huggingface.export_folder import Export, write_folder
from phalanx.families.language.huggingface.find_architecture import architecture_for
from phalanx.families.language.huggingface.folder_files import TokenizerFiles
from small_models import FAMILIES, LLAMA, random_decoder, random_tokens
from small_transformers import huggingface_config, save_huggingface

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama scaled tied": ("llama", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "llama biases, wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama no groups, odd MLP": ("llama", {"num_key_value_heads": 6, "intermediate_size": 65}),
    "llama one group": ("llama", {"num_key_value_heads": 1}),
    "gpt2": ("gpt2", {"bos_token_id": 0, "eos_token_id": 0}),
    "gpt2 untied exact": ("gpt2", {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "gelu"}),
    "mpt": ("mpt", {}),
    "mpt clipped untied": ("mpt", {"attn_config": {"clip_qkv": 0.5}, "tie_word_embeddings": False, "n_heads": 3}),
    "mistral": ("mistral", {}),
    "mistral tied scaled": ("mistral", {"tie_word_embeddings": True, "rope_parameters": ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {**YARN, "truncate": False}}),
    "olmo2": ("olmo2", {}),
    "olmo2 one group, scaled": ("olmo2", {"num_key_value_heads": 1, "rope_parameters": ROPE}),
    "olmoe": ("olmoe", {}),
    "olmoe normalised tied": ("olmoe", {"norm_topk_prob": True, "tie_word_embeddings": True, "num_experts_per_tok": 4}),
    "phi3": ("phi3", {}),
    "phi3 partial tied": (
        "phi3",
        {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
        },
    ),
    "gpt_neox": ("gpt_neox", {"num_attention_heads": 3}),
    "gpt_neox one after another": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "num_attention_heads": 2,
            "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 uncapped untied": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma2 capped hard": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", {}),
    "gemma3 stretched": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "final_logit_softcapping": 5.0,
        },
    ),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mixtral window": ("mixtral", {"sliding_window": 7}),
    "phi3 window": ("phi3", {"sliding_window": 7}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 greedy, queries compressed, yarn": (
        "deepseek_v2",
        {
            "topk_method": "greedy",
            "q_lora_rank": 20,
            "n_shared_experts": 1,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 one group, tied, yarn": (
        "deepseek_v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral grouped rows": ("mixtral", {"num_experts_per_tok": 4, "intermediate_size": 128}),
    "qwen3_moe one expert a token": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe dense first, normalised": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
}


def load(folder: HuggingFaceFolder) -> Decoder:
    decoder = Decoder(folder.model)
    decoder.load_state_dict({name: folder.read(name) for name in decoder.state_dict()})
    return decoder


def export(path: Path, decoder: Decoder, architecture_name: str | None = None, **options: Any) -> None:
    weights = decoder.state_dict()
    fields = {"dtype": torch.float32, "tokenizer": TokenizerFiles(), **options}
    architecture = architecture_for(decoder.config, architecture_name)
    write_folder(path, Export(decoder.config, architecture, lambda name, rows: weights[name][rows], **fields))


def logits_of(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    if any(name.endswith(".experts") for name, _ in model.named_modules()):
        # Grouped products want rows of a multiple of 16 bytes.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        result: torch.Tensor = model(tokens).logits
    return result


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    theirs = save_huggingface(tmp_path / "in", huggingface_config(name, **changes))
    with HuggingFaceFolder(tmp_path / "in") as folder:
        decoder = load(folder)
    tokens = random_tokens(2, 60)
    expected = logits_of(theirs, tokens)
    torch.testing.assert_close(
        decoder.logits(tokens), expected, rtol=0, atol=min(1e-4, 2e-5 * max(1.0, expected.std().item()))
    )
    assert expected.std() > 0.5, "logits too small to tell models apart"

    export(tmp_path / "out", decoder, theirs.config.architectures[0], shard_bytes=40_000)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert torch.equal(logits_of(again, tokens), expected)
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for tensor_name, tensor in before.items():
        assert torch.equal(tensor, after[tensor_name]), tensor_name


EXPORTED = {
    **FAMILIES,
    "llama tied": LLAMA.model_copy(update={"tied_head": True, "rope_scaling": None}),
    "llama biases": LLAMA.model_copy(update={"bias": True, "norm_eps": 1e-3}),
    "gpt untied": FAMILIES["gpt"].model_copy(update={"tied_head": False, "d_ff": 65, "mlp": "gelu"}),
    "mpt clipped": FAMILIES["mpt"].model_copy(update={"clip_qkv": 0.4, "tied_head": False}),
}


@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_computes_our_logits_from_an_export(name: str, tmp_path: Path) -> None:
    model = EXPORTED[name]
    decoder = random_decoder(model)
    export(tmp_path / "out", decoder)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    tokens = random_tokens(2, 60)
    torch.testing.assert_close(logits_of(theirs, tokens), decoder.logits(tokens), rtol=0, atol=1e-4)
    with HuggingFaceFolder(tmp_path / "out") as folder:
        assert folder.model == same_shape(model)
        for ours, parameter in decoder.named_parameters():
            assert torch.equal(folder.read(ours), parameter), ours


def same_shape(model: LanguageModel) -> LanguageModel:
    """`model` as an import states it: the defaults that stand in for null written out."""
    if model.positions == "rope":
        return model.model_copy(update={"head_dim": model.head_size})
    return model.model_copy(update={"d_ff": model.ff_size if model.positions == "learned" else None})


def test_bfloat16_export_rounds_once_and_says_so(tmp_path: Path) -> None:
    decoder = random_decoder(LLAMA)
    export(tmp_path / "out", decoder, dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(theirs.model.embed_tokens.weight, decoder.embedding.weight.bfloat16())
    with HuggingFaceFolder(tmp_path / "out") as folder:
        assert folder.format_of("embedding.weight") == torch.bfloat16


def test_large_exports_are_split_with_an_index(tmp_path: Path) -> None:
    decoder = random_decoder(LLAMA)
    export(tmp_path / "out", decoder, shard_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in decoder.parameters())
    assert all((tmp_path / "out" / name).stat().st_size < 40_000 + 2_000 for name in files)


def test_both_notations_of_rotary_settings_are_read(tmp_path: Path) -> None:
    save_huggingface(tmp_path, huggingface_config("llama", rope_parameters=ROPE))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    new = HuggingFaceFolder(tmp_path).model
    scaling = {key: value for key, value in config.pop("rope_parameters").items() if key != "rope_theta"}
    scaling["type"] = scaling.pop("rope_type")
    file.write_text(json.dumps({**config, "rope_theta": 5000.0, "rope_scaling": scaling}))
    assert HuggingFaceFolder(tmp_path).model == new
    assert new.rope_theta == 5000.0
    assert new.rope_scaling == LLAMA.rope_scaling


def test_checkpoints_of_the_bare_model_are_read(tmp_path: Path) -> None:
    """GPT-2's own files name tensors without "transformer." and hold the causal mask."""
    theirs = save_huggingface(tmp_path, huggingface_config("gpt2"))
    stripped = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    stripped["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file({name: tensor.clone() for name, tensor in stripped.items()}, tmp_path / "model.safetensors")
    with HuggingFaceFolder(tmp_path) as folder:
        tokens = random_tokens(1, 20)
        torch.testing.assert_close(load(folder).logits(tokens), logits_of(theirs, tokens), rtol=0, atol=1e-4)
