"""Opening weights: what is found where, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint import CheckpointStore
from phalanx.config.load import dump_run, load_run
from phalanx.errors import CheckpointError, ConfigError
from phalanx.families.language.evaluation.load_weights import load_for_inference, open_weights
from small_models import LLAMA, READER, byte_tokenizer, random_decoder, run_of, save_run

CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[4] / "examples"


def test_a_run_directory_gives_its_newest_checkpoint(tmp_path: Path) -> None:
    save_run(tmp_path, random_decoder(READER, seed=1), step=10)
    newer = random_decoder(READER, seed=2)
    run = save_run(tmp_path, newer, step=20)
    loaded = load_for_inference(tmp_path, CPU)
    assert (loaded.step, loaded.run, loaded.where.name) == (20, run, "step-00000020")
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), newer.parameters(), strict=True))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode_prompt("def x") == byte_tokenizer().encode("def x").ids
    older = load_for_inference(tmp_path / "checkpoints" / "step-00000010", CPU)
    assert older.step == 10
    assert older.tokenizer is not None, "a checkpoint inside a run directory shares its tokenizer"


def test_keeping_weights_in_the_activations_format_changes_no_number(tmp_path: Path) -> None:
    save_run(tmp_path, random_decoder(LLAMA))
    loaded = load_for_inference(tmp_path, CPU, dtype=torch.bfloat16).model
    tokens = torch.arange(20)[None]
    assert loaded.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.logits(tokens), random_decoder(LLAMA, dtype=torch.bfloat16).logits(tokens))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        open_weights(path)
    return str(raised.value).replace(str(path), "PATH")


def test_folders_without_weights(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing") == (
        "PATH is not a folder; give a run directory, a checkpoint in it, or a Hugging Face folder"
    )
    assert refusal(tmp_path) == (
        "PATH holds neither a whole checkpoint of Phalanx nor the config.json of a Hugging Face folder"
    )


def save_state(path: Path, state: dict[str, Any], drop: str = "") -> None:
    named = random_decoder(LLAMA).named_parameters()
    tensors = {f"model.{name}": parameter.detach() for name, parameter in named if name != drop}
    with CheckpointStore(path / "checkpoints", keep_last=1) as store:
        store.save(1, tensors, state)


def test_a_checkpoint_that_does_not_fit_its_own_description(tmp_path: Path) -> None:
    where = "PATH/checkpoints/step-00000001"
    save_state(tmp_path / "a", {"run": dump_run(run_of(LLAMA))}, drop="blocks.1.mlp.down.weight")
    assert refusal(tmp_path / "a") == (
        f"{where}: 1 tensors do not fit the model it describes; blocks.1.mlp.down.weight is missing, "
        "but should be [48, 96]"
    )
    save_state(tmp_path / "b", {"run": dump_run(run_of(LLAMA.model_copy(update={"d_ff": 128})))})
    assert refusal(tmp_path / "b") == (
        f"{where}: 4 tensors do not fit the model it describes; blocks.0.mlp.gate_up.weight is [192, 48], "
        "but should be [256, 48]"
    )
    save_state(tmp_path / "c", {"model": LLAMA.model_copy(update={"n_layers": 10_000}).model_dump()})
    assert refusal(tmp_path / "c") == f"{where}: 10000 layers, but 15 tensors of a model"
    save_state(tmp_path / "d", {"model": LLAMA.model_copy(update={"n_layers": 10**9}).model_dump()})
    assert refusal(tmp_path / "d") == (
        f"{where}/state.json does not describe a model: n_layers: Input should be less than or equal to 10000"
    )
    save_state(tmp_path / "e", {"model": {"n_layers": 1}})
    assert refusal(tmp_path / "e").startswith(f"{where}/state.json does not describe a model: d_model: Field required")
    save_state(tmp_path / "f", {})
    assert refusal(tmp_path / "f").startswith(f"{where}/state.json does not describe a model")


@pytest.mark.parametrize(("example", "verb"), [("materials-xtb", "errors"), ("climax-small", "forecast")])
def test_models_of_other_families_are_pointed_to_their_verb(tmp_path: Path, example: str, verb: str) -> None:
    save_state(tmp_path, {"run": dump_run(load_run(EXAMPLES / f"{example}.yaml"))})
    with pytest.raises(ConfigError, match=f"this is for language models: `phalanx {verb}` scores it"):
        open_weights(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_run(tmp_path, random_decoder(READER))
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"the tokenizer.json of .*step-00000010: not a tokenizer that can be read"
    ):
        load_for_inference(tmp_path, CPU)
