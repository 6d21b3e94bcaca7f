"""Checkpoints of mixtures of experts: a few experts in memory at a time, both layouts of files, and state of routers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from live_bytes import LiveBytes
from phalanx.checkpoint import saver, shard_plan
from phalanx.families.language.evaluation import load_weights
from phalanx.families.language.evaluation.convert_weights import convert_weights
from phalanx.families.language.evaluation.load_weights import open_weights
from small_transformers import huggingface_config, save_huggingface

WIDE = {"num_hidden_layers": 8, "num_experts": 16, "moe_intermediate_size": 32, "intermediate_size": 32}


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_model_of_many_files_goes_both_ways_in_the_memory_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar of a 100B checkpoint is the memory of one file: here all sizes that hold for real ones are small."""
    shard = 100_000
    monkeypatch.setattr(load_weights, "_WINDOW_BYTES", shard // 4)
    monkeypatch.setattr(saver, "MAX_FILE_BYTES", shard // 4)
    monkeypatch.setattr(shard_plan, "MAX_CHUNK_BYTES", shard // 8)
    theirs = save_huggingface(tmp_path / "hf", huggingface_config("qwen3_moe", **WIDE), max_shard_size="100KB")
    total = sum(4 * parameter.numel() for parameter in theirs.parameters())
    assert total > 25 * shard and len(list((tmp_path / "hf").glob("*.safetensors"))) > 25
    with LiveBytes() as reading:
        convert_weights(tmp_path / "hf", tmp_path / "ours")
    with LiveBytes() as writing:
        convert_weights(tmp_path / "ours", tmp_path / "again", shard_bytes=shard)
    assert 0 < reading.peak < shard, "the embedding and what it is joined of are the largest"
    assert 0 < writing.peak < shard
    # One tensor of ours holds all experts of a block: it is never there as a whole.
    experts = 16 * 2 * 32 * 48 * 4
    assert experts > shard
    before, after = files_of(tmp_path / "hf"), files_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    files = list((tmp_path / "again").glob("*.safetensors"))
    assert len(files) > 25 and max(file.stat().st_size for file in files) < shard + 5_000


def test_live_bytes_counts_what_is_there_at_once() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second.view(10, 100)
        del second
        assert (live.now, live.peak) == (4000, 8000)
        del third
    assert live.now == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_of_a_layer_in_one_tensor_are_read_alike(name: str, tmp_path: Path) -> None:
    """transformers 5 keeps experts so in memory, and writes them so when asked to."""
    theirs = save_huggingface(tmp_path / "apart", huggingface_config(name))
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in files_of(tmp_path / "fused"))
    with open_weights(tmp_path / "apart") as apart, open_weights(tmp_path / "fused") as fused:
        for key in apart.shapes:
            assert torch.equal(apart.read(key), fused.read(key)), key
            rows = slice(1, apart.shapes[key][0] - 1)
            assert torch.equal(apart.read(key, rows), fused.read(key)[rows]), key
    convert_weights(
        tmp_path / "fused", tmp_path / "again", to="huggingface", architecture=theirs.config.architectures[0]
    )
    before, after = files_of(tmp_path / "apart"), files_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_huggingface(tmp_path, huggingface_config("mixtral"))
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(load_weights.CheckpointError, match=f"tensor {lost} is missing"):
        open_weights(tmp_path)


def test_an_import_begins_with_all_experts_alike(tmp_path: Path) -> None:
    """What a router counted in training is no part of a Hugging Face checkpoint."""
    save_huggingface(tmp_path / "hf", huggingface_config("mixtral"))
    convert_weights(tmp_path / "hf", tmp_path / "ours", dtype=torch.bfloat16)
    with open_weights(tmp_path / "ours") as ours:
        load = ours.read("blocks.1.mlp.router.load")
        assert load.dtype == torch.float32 and torch.equal(load, torch.full((5,), 0.2))
        assert ours.format_of("blocks.1.mlp.router.weight") == torch.bfloat16
        assert ours.widest_format() == torch.bfloat16


def test_an_architecture_can_be_asked_for(tmp_path: Path) -> None:
    """A Mistral without a window is a Llama; its name is kept where it is asked for."""
    save_huggingface(tmp_path / "hf", huggingface_config("mistral"))
    for architecture, name in ((None, "LlamaForCausalLM"), ("MistralForCausalLM", "MistralForCausalLM")):
        done = convert_weights(tmp_path / "hf", tmp_path / name, to="huggingface", architecture=architecture)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert done.architecture == name and config["architectures"] == [name]
