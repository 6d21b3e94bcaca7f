"""Recipes of Megatron-Bridge: which of their facts a run gets."""

from dataclasses import replace
from pathlib import Path

import pytest

from published.cells import COLUMNS
from published.frameworks import OtherFramework, framework_of
from published.recipes import with_recipe
from published.runs import PublishedRun, read_published_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    table: Path = tmp_path_factory.mktemp("runs") / "runs.csv"
    table.write_text(f"{','.join(COLUMNS)}\none{',' * (len(COLUMNS) - 1)}\n")
    return read_published_runs(table)[0]


def _recipe(run: PublishedRun, model: str, device: str, release: str, precision: str) -> OtherFramework:
    name = f"Megatron-Bridge {release}"
    framework = framework_of(name)
    assert framework is not None
    asked = replace(run, model_name=model, device=device, framework=name, precision=precision)  # type: ignore[arg-type]
    found = with_recipe(framework, asked)
    assert isinstance(found, OtherFramework)
    return found


def test_recipes_of_whole_steps_are_those_of_mxfp8_from_a_release_on(run: PublishedRun) -> None:
    now = _recipe(run, "Qwen3_30B_a3B", "GB300", "26.06", "mxfp8")
    assert now.fused_experts and now.hides_rows and now.rows_once_a_rank and now.attention_exponentials == 32
    for release, precision in (("26.04.01", "mxfp8"), ("26.06.01", "bf16")):
        before = _recipe(run, "Qwen3_30B_a3B", "GB300", release, precision)
        assert not before.fused_experts and not before.hides_rows and before.rows_once_a_rank
        assert before.attention_exponentials == 0
    assert _recipe(run, "DeepSeekV3", "GB200", "26.08", "mxfp8").attention_exponentials == 0


def test_rows_go_by_nccl_where_no_other_way_is_named(run: PublishedRun) -> None:
    assert not _recipe(run, "GPT OSS 120B", "GB300", "26.04", "bf16").rows_once_a_rank
    assert _recipe(run, "GPT OSS 120B", "B300", "26.04", "bf16").rows_once_a_rank
    assert not _recipe(run, "Qwen3_30B_a3B", "B200", "26.02", "mxfp8").rows_once_a_rank
    assert _recipe(run, "Qwen3_30B_a3B", "B200", "26.02.01", "mxfp8").rows_once_a_rank


def test_models_have_their_own(run: PublishedRun) -> None:
    llama, mixture = (_recipe(run, name, "H100 SXM", "26.04", "bf16") for name in ("LLAMA3_70B", "GPT OSS 120B"))
    assert llama.hides_tp and not llama.biased_experts and not llama.recomputes_activation
    assert mixture.biased_experts and mixture.recomputes_activation and not mixture.hides_tp
    kimi = _recipe(run, "Kimi_K2", "GB300", "26.06", "mxfp8")
    assert kimi.rows_once_a_rank and not kimi.hides_rows and not kimi.fused_experts
    assert with_recipe(llama, replace(run, framework="nanotron")) is llama
