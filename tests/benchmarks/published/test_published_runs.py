"""Published runs as a table: figures in our units, reasons for what cannot be used, errors for what cannot be read."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.model import LanguageModel
from phalanx.config.presets import load_preset
from phalanx.errors import DataError
from phalanx.hardware.device_facts import known_devices
from phalanx.layout.spec import ResolvedLayout
from phalanx.planner.measured.runs import Memory, Rate
from published import flops as published_flops
from published.cells import COLUMNS
from published.runs import AGREEMENT, PublishedRun, read_published_runs, summarise

GPT = {
    "row_id": "group-1",
    "tag": "read",
    "group": "vtrain-single",
    "gpu": "A100-80GB-SXM",
    "gpu_unit": "GPU",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "model": "1.7B",
    "family": "GPT decoder",
    "layers": "24",
    "hidden": "2304",
    "heads": "24",
    "kv_heads": "24",
    "ffn": "9216",
    "vocab": "51200",
    "seq": "2048",
    "precision": "fp16",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "zero_stage": "0",
    "mbs": "2",
    "gbs": "64",
    "recompute": "full",
    "step_time_s": "1.6",
    "status": "ok",
}
"""A row that can be used."""


def written(folder: Path, *rows: dict[str, str], columns: Sequence[str] = COLUMNS) -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_one(folder: Path, **changes: str) -> PublishedRun:
    (run,) = read_published_runs(written(folder, GPT | changes))
    return run


# --- one row -----------------------------------------------------------------------------------------------------------


def test_a_row_in_our_words(tmp_path: Path) -> None:
    run = read_one(tmp_path)
    assert run.used and not run.reason and not run.assumed
    assert (run.device, run.devices, run.devices_per_node) == ("A100-80GB", 16, 8)
    assert run.layout == ResolvedLayout(global_batch=64, microbatch=2, dp_replicate=4, tp=2, pp=2, zero=0)
    assert (run.recompute, run.precision, run.sequence_length, run.status) == ("full", "fp16", 2048, "ok")
    assert run.model == LanguageModel(
        n_layers=24,
        d_model=2304,
        n_heads=24,
        n_kv_heads=24,
        d_ff=9216,
        vocab_size=51200,
        max_positions=2048,
        positions="learned",
        norm="layernorm",
        mlp="gelu_tanh",
        bias=True,
        tied_head=True,
    )
    # 64 samples of 2,048 tokens in 1.6 s on 16 devices.
    assert run.rate == Rate(5120.0, "step_time_s")
    assert run.memory is None and run.agreement is None and run.sequence_parallel is None


@pytest.mark.parametrize(
    ("cells", "rate"),
    [
        ({"tokens_per_s_per_gpu": "5000"}, Rate(5000.0, "tokens_per_s_per_gpu")),
        ({"step_time_s": "", "samples_per_s": "40"}, Rate(5120.0, "samples_per_s")),
        ({"step_time_s": "", "tflops_per_gpu": "100", "group": "llm-foundry"}, "tflops_per_gpu by every_parameter"),
        ({"step_time_s": "", "mfu_pct": "50", "group": "nanotron"}, "mfu_pct by palm"),
    ],
)
def test_where_rates_are_from(cells: dict[str, str], rate: Rate | str, tmp_path: Path) -> None:
    run = read_one(tmp_path, **cells)
    assert run.used and run.rate is not None
    if isinstance(rate, Rate):
        assert run.rate == rate
    else:
        assert run.rate.source == rate and 5_000 < run.rate.tokens_per_s < 20_000


def test_a_module_is_two_devices(tmp_path: Path) -> None:
    module = {
        "gpu": "MI250X",
        "gpu_unit": "module (2 GCD)",
        "n_gpus": "8",
        "gpus_per_node": "4",
        "tokens_per_s_per_gpu": "8000",
        "mem_per_gpu": "100",
        "mem_unit": "GB",
        "mem_kind": "peak",
    }
    run = read_one(tmp_path, **module)
    assert (run.device, run.devices, run.devices_per_node) == ("MI250X GCD", 16, 8)
    assert run.rate == Rate(4000.0, "tokens_per_s_per_gpu") and run.memory == Memory(50.0, "peak")
    as_gcds = read_one(tmp_path, **module | {"gpu_unit": "GCD", "n_gpus": "16"})
    assert as_gcds.rate == Rate(8000.0, "tokens_per_s_per_gpu") and as_gcds.memory == Memory(100.0, "peak")
    unknown = read_one(tmp_path, **module | {"gpu_unit": ""})
    assert unknown.reason == "it is not said whether figures are for modules or for GCDs"


@pytest.mark.parametrize(
    ("stated", "device"),
    [
        ("A100-40GB-SXM?", "A100-40GB"),
        ("H100-80GB-SXM", "H100 SXM"),
        ("H100-96GB-HBM2e (2.4 TB/s)", "H100-96GB-HBM2e"),
        ("H200-141GB-SXM", "H200"),
        ("MI300X", "MI300X"),
        ("MI250-128GB", "MI250 GCD"),
        ("V100-32GB", "V100"),
        ("GB200", "GB200"),
    ],
)
def test_devices_have_our_names(stated: str, device: str, tmp_path: Path) -> None:
    assert read_one(tmp_path, gpu=stated).device == device
    # One H100 differs from ours and must not pass for it.
    assert (device in {facts.name for _, facts in known_devices()}) == (device != "H100-96GB-HBM2e")


def test_what_is_not_stated_is_filled_in_and_named(tmp_path: Path) -> None:
    blank = dict.fromkeys(("kv_heads", "ffn", "vocab", "zero_stage", "dp"), "")
    run = read_one(tmp_path, **blank, gpu="A100")
    assert run.used and run.model is not None
    assert (run.model.n_kv_heads, run.model.d_ff, run.model.vocab_size) == (None, 9216, 51200)
    assert run.layout == ResolvedLayout(global_batch=64, microbatch=2, dp_replicate=4, tp=2, pp=2, zero=0)
    assert run.assumed == ("d_ff=9216", "n_kv_heads=24", "vocab_size=51200", "80 GB a device", "ZeRO stage")
    assert read_one(tmp_path, vocab="51200?").assumed == ("vocab=51200",)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama-3.1-8B", "llama3.1-8b"),
        ("LLAMA3_70B", "llama3-70b"),
        ("LLAMA3.1_405B", "llama3-405b"),
        ("MPT-7b", "mpt-7b"),
    ],
)
def test_a_known_name_fills_in_sizes(name: str, preset: str, tmp_path: Path) -> None:
    blank = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "family"), "")
    run = read_one(tmp_path, model=name, **blank)
    assert run.used, run.reason
    wanted = load_preset(preset).model()
    sizes = ("n_layers", "d_model", "n_heads", "kv_heads", "ff_size", "vocab_size", "norm", "mlp", "tied_head")
    assert [getattr(run.model, size) for size in sizes] == [getattr(wanted, size) for size in sizes]


def test_three_matrices_are_two_thirds_as_wide(tmp_path: Path) -> None:
    run = read_one(tmp_path, model="Llama-1.7B", ffn="")
    assert run.model is not None and run.model.mlp == "swiglu" and run.model.d_ff == 6144
    known = read_one(tmp_path, model="Llama-2-7B", **dict.fromkeys(("ffn", "hidden", "heads", "kv_heads"), "")).model
    assert known is not None and (known.n_layers, known.d_model, known.d_ff) == (24, 4096, 11008)


LAYOUTS: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"zero_stage": "1"}, {"dp_shard": 4, "zero": 1}),
    ({"zero_stage": "", "sharding": "DDP/distributed optimizer"}, {"dp_shard": 4, "zero": 1}),
    ({"zero_stage": "", "sharding": "FSDP SHARD_GRAD_OP"}, {"dp_shard": 4, "zero": 2}),
    ({"zero_stage": "3"}, {"dp_shard": 4, "zero": 3}),
    (
        {"zero_stage": "3", "pp": "1", "dp": "8", "sharding": "HSDP shard 4 x replicate 2"},
        {"dp_shard": 4, "dp_replicate": 2, "zero": 3, "pp": 1, "reshard_after_forward": True},
    ),
    (
        {"zero_stage": "3", "pp": "1", "dp": "8", "sharding": "FSDP 2 x DDP 4"},
        {"dp_shard": 2, "dp_replicate": 4, "zero": 3, "pp": 1, "reshard_after_forward": True},
    ),
    ({"vpp": "3"}, {"dp_replicate": 4, "zero": 0, "schedule": "interleaved_1f1b", "stages_per_rank": 3}),
    ({"cp": "2", "dp": "2"}, {"dp_replicate": 2, "cp": 2, "zero": 0}),
]


@pytest.mark.parametrize(("cells", "fields"), LAYOUTS)
def test_layouts(cells: dict[str, str], fields: dict[str, Any], tmp_path: Path) -> None:
    layout = read_one(tmp_path, **cells).layout
    assert layout == ResolvedLayout(**{"global_batch": 64, "microbatch": 2, "tp": 2, "pp": 2} | fields)


REASONS = [
    ({"tag": "recalled"}, "it was recalled from memory, not seen"),
    (
        {"framework": "Megatron-Bridge 26.06.01", "model": "GPT OSS 120B"},
        "its source calls it a regression, of a kernel that took ten times as long",
    ),
    ({"status": "ok (unreliable)"}, "its source calls it unreliable"),
    ({"notes": "ANALYTIC, not measured: equals 18 B"}, "its figures were calculated by the source, not measured"),
    ({"family": "ViT weather"}, "it is not a language model"),
    ({"model": "Mixtral-8x220B"}, "it is a mixture of experts whose sizes are not known"),
    ({"ep": "8"}, "it is a mixture of experts whose sizes are not known"),
    ({"model": "Nemotron_3_Nano"}, "it has state-space layers (Mamba), as no plan of ours"),
    ({"model": "DeepSeekV4 Flash"}, "its attention reads compressed and chosen keys, as no plan of ours"),
    ({"model": "LLAMA2-13B LoRA"}, "it trains adapters alone"),
    ({"precision": "NVFP4"}, "it computes in a format that no recipe has (NVFP4)"),
    ({"precision": ""}, "the source does not state the number format"),
    ({"gpu": "MI250X / A100"}, "the device 'MI250X / A100' is not one that is known"),
    ({"gpu": "TPU v4"}, "the device 'TPU v4' is not one that is known"),
    ({"layers": "", "heads": ""}, "the source does not state layers, heads"),
    ({"heads": "25"}, "no model of ours has its shape: Value error, n_heads=25 does not divide d_model=2304"),
    ({"n_gpus": "192..3072"}, "the source gives n_gpus as '192..3072', not one number"),
    ({"seq": "(128/4)*(256/4)=2048 tokens"}, "the source gives seq as '(128/4)*(256/4)=2048 tokens', not one number"),
    ({"tp": "", "gbs": ""}, "the source does not state tp, gbs"),
    ({"layers": "24", "vpp": "13"}, "its pp=2 x vpp=13 = 26 pipeline stages are more than its 24 layers"),
    ({"tp": "3"}, "tp=3 x pp=2 x cp=1 does not divide its 16 devices"),
    ({"dp": "2"}, "tp=2 x pp=2 x cp=1 x dp=2 is not its 16 devices"),
    ({"gbs": "60"}, "its global batch of 60 is not a multiple of mbs=2 x dp=4"),
    ({"grad_accum": "4"}, "it states 4 micro-batches a step, but its batches make 8"),
    ({"sharding": "FSDP 2 x DDP 4"}, "2 shards x 4 replicas are not the 4 data-parallel ranks stated"),
    ({"recompute": ""}, "the source does not state whether activations are recomputed"),
    ({"recompute": "selective layer"}, "it recomputes whole blocks, but only every second one"),
    ({"step_time_s": ""}, "the source states neither a rate that can be converted to tokens nor memory"),
    (
        {"step_time_s": "", "tflops_per_gpu": "80.6", "group": "lumi"},
        "it states tflops_per_gpu alone, and what its source counts is not known",
    ),
]


@pytest.mark.parametrize(("cells", "reason"), REASONS)
def test_a_row_that_cannot_be_used_says_why(cells: dict[str, str], reason: str, tmp_path: Path) -> None:
    run = read_one(tmp_path, **cells)
    assert not run.used and run.reason.startswith(reason)


def test_an_unstated_microbatch_leaves_the_layout_for_others_to_finish(tmp_path: Path) -> None:
    run = read_one(tmp_path, mbs="")
    assert not run.used and run.reason == "the source does not state mbs"
    assert run.layout == ResolvedLayout(global_batch=64, dp_replicate=4, tp=2, pp=2, zero=0)


def test_runs_that_did_not_fit(tmp_path: Path) -> None:
    run = read_one(tmp_path, status="oom", step_time_s="")
    assert run.used and run.status == "oom" and run.rate is None
    few = read_one(tmp_path, status="oom", step_time_s="", gbs="4")
    assert few.used and few.layout is not None and few.layout.global_batch == 8
    assert few.assumed == ("global_batch=8",)


@pytest.mark.parametrize(
    ("cells", "memory"),
    [
        ({"mem_per_gpu": "39.5", "mem_unit": "GiB", "mem_kind": "peak"}, Memory(39.5, "peak")),
        ({"mem_per_gpu": "39", "mem_unit": "GB", "mem_kind": ""}, Memory(39.0, "not stated")),
        ({"mem_per_gpu": "308", "mem_unit": "GB total (whole model)", "mem_kind": "weights"}, None),
        ({"mem_per_gpu": "0.58", "mem_unit": "GiB", "mem_kind": "activations relative"}, None),
    ],
)
def test_memory(cells: dict[str, str], memory: Memory | None, tmp_path: Path) -> None:
    assert read_one(tmp_path, **cells).memory == memory


# --- cells and tables that cannot be read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            {"hidden": "-2304"},
            "line 2, column hidden: -2304 is not a positive number; correct it, or leave the cell blank",
        ),
        ({"tflops_per_gpu": "nan", "step_time_s": ""}, "line 2, column tflops_per_gpu: nan is not a positive number"),
        ({"step_time_s": "inf"}, "column step_time_s: inf is not a positive number"),
        ({"mbs": "0"}, "column mbs: 0 is not a positive number"),
        ({"seq": "-1"}, "column seq: -1 is not a positive number"),
        ({"gpus_per_node": "0"}, "column gpus_per_node: 0 is not a positive number"),
        ({"layers": "23.5"}, "line 2, column layers: 23.5 is not whole"),
        ({"ffn": "12345678901234567890"}, "column ffn: 12345678901234567890 is more than 100,000,000"),
    ],
)
def test_a_number_that_cannot_be_costs_its_row_alone(cells: dict[str, str], reason: str, tmp_path: Path) -> None:
    bad, good = read_published_runs(written(tmp_path, GPT | cells, GPT | {"row_id": "group-2"}))
    assert not bad.used and bad.reason.startswith("line 2, ") and reason in bad.reason
    assert good.used


def test_tables_of_spreadsheets_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, GPT)
    path.write_text("\ufeff" + path.read_text() + "," * (len(COLUMNS) - 1) + "\n")
    assert [run.row_id for run in read_published_runs(path)] == ["group-1"]


def test_a_table_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    columns = [column for column in COLUMNS if column not in ("tp", "seq")]
    with pytest.raises(DataError, match=r"runs\.csv: the header lacks seq, tp$"):
        read_published_runs(written(tmp_path, GPT, columns=columns))
    with pytest.raises(DataError, match=r"line 3: row_id 'group-1' stands twice"):
        read_published_runs(written(tmp_path, GPT, GPT))
    with pytest.raises(DataError, match="line 2: row_id is blank; give every row a name of its own"):
        read_one(tmp_path, row_id="")
    path = written(tmp_path, GPT)
    path.write_text(path.read_text() + "one,two\n")
    with pytest.raises(DataError, match=f"line 3: 2 cells under {len(COLUMNS)} columns"):
        read_published_runs(path)
    path.write_bytes(b"row_id,\xff\n")
    with pytest.raises(DataError, match="cannot be read as a table of measured runs"):
        read_published_runs(path)
    with pytest.raises(DataError, match=r"nowhere\.csv: cannot be read"):
        read_published_runs(tmp_path / "nowhere.csv")
    path.write_text("")
    with pytest.raises(DataError, match="the header lacks row_id"):
        read_published_runs(path)


def test_columns_may_stand_in_any_order_and_others_beside_them(tmp_path: Path) -> None:
    path = written(tmp_path, GPT, columns=["more", *reversed(COLUMNS)])
    assert read_published_runs(path)[0].rate == Rate(5120.0, "step_time_s")


# --- conventions, with figures worked out by hand ------------------------------------------------------------------------

TINY = LanguageModel(
    n_layers=2,
    d_model=8,
    n_heads=2,
    d_ff=32,
    vocab_size=100,
    max_positions=16,
    mlp="gelu",
    norm="rmsnorm",
    bias=False,
)
"""Blocks of 4 x 64 + 2 x 256 = 768 parameters in matrices and 16 in norms; a norm of 8; table and head of 800 each."""


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        # 6 x (2 x 784 + 8 + 1,600) + 12 x 2 x 8 x 16
        ("every_parameter", 6 * 3176 + 3072),
        # 6 x (2 x 768 + 800) + 12 x 2 x 8 x 16
        ("palm", 6 * 2336 + 3072),
        ("causal", 6 * 2336 + 1536),
        # 6 x (2 x 784 + 8 + 800) + 12 x 2 x 8 x 16
        ("without_embedding", 6 * 2376 + 3072),
        # 72 x 2 x 64 x (1 + 16/48 + 100/192)
        ("megatron_model", 9216 + 3072 + 4800),
        # 96 x 2 x 64 x (1 + 16/48 + 100/256)
        ("megatron_hardware", 12288 + 4096 + 4800),
        ("blocks_eight_times", 12288),
    ],
)
def test_conventions_by_hand(name: str, by_hand: float) -> None:
    assert getattr(published_flops, name)(TINY, 16) == pytest.approx(by_hand)


def test_sources_count_as_documented() -> None:
    wanted = {
        "llm-foundry": "every_parameter",
        "nemo-24.07": "palm",
        "dgxc-24.09": "palm",
        "megatron-bridge": "causal",
        "torchtitan": "without_embedding",
        "megatron-2104": "megatron_hardware",
        "bigscience-a100": "megatron_hardware",
        "vtrain-multi": "megatron_hardware",
        "korthikanti": "megatron_model",
        "megatron-h100": "megatron_model",
        "frontier-forge": "megatron_hardware",
    }
    found = {group: published_flops.convention_of(group, "") for group in wanted}
    assert {group: convention and convention.__name__ for group, convention in found.items()} == wanted
    assert published_flops.convention_of("lumi", "") is None
    low = published_flops.convention_of("bigscience-a100", "TFLOPs ~3% under-reported before 02-21")
    assert low is published_flops.blocks_eight_times


# --- the shared table --------------------------------------------------------------------------------------------------

TABLE = Path(__file__).parents[3].parent / "shared" / "reference" / "published_runs.csv"
needs_table = pytest.mark.skipif(not TABLE.exists(), reason=f"{TABLE} is not there")


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return read_published_runs(TABLE)


@needs_table
def test_rows_that_state_a_time_and_a_rate_agree(runs: list[PublishedRun]) -> None:
    compared = [run for run in runs if run.agreement is not None]
    assert len(compared) > 600
    assert not [(run.row_id, run.agreement) for run in compared if abs(run.agreement - 1.0) > AGREEMENT]
    assert {run.group for run in compared} >= {
        "llm-foundry",
        "vtrain-single",
        "vtrain-multi",
        "bigscience-a100",
        "megatron-bridge",
        "nemo-24.07",
        "torchtitan",
        "megatron-2020",
        "korthikanti",
    }


@needs_table
def test_every_row_is_complete_or_says_why_not(runs: list[PublishedRun]) -> None:
    peaks = {facts.name: facts.peak_tflops for _, facts in known_devices()}
    for run in runs:
        assert run.used != bool(run.reason), run.row_id
        if not run.used:
            continue
        assert run.tag != "recalled" and run.model and run.layout and run.device and run.precision and run.recompute
        assert run.layout.world_size == run.devices, run.row_id
        assert run.rate or run.memory or run.status == "oom", run.row_id
        if run.rate and run.device in peaks:
            flops = run.rate.tokens_per_s * published_flops.causal(run.model, run.sequence_length or 0)
            assert 0.005 < flops / 1e12 / peaks[run.device]["fp8" if "fp8" in run.precision else run.precision] < 0.8, (
                run.row_id
            )


@needs_table
def test_what_the_groups_are_good_for(runs: list[PublishedRun]) -> None:
    found = {summary.group: summary for summary in summarise(runs)}
    assert sum(summary.rows for summary in found.values()) == len(runs)
    assert sum(summary.used for summary in found.values()) >= 650
    assert sum(summary.memory for summary in found.values()) >= 60
    assert sum(summary.out_of_memory for summary in found.values()) >= 4
    assert found["vtrain-single"].used == found["vtrain-single"].rows
    assert found["frontier-forge"].devices == ("MI250X GCD",)
    assert not found["llm-foundry"].reasons
    assert found["nanotron"].rates == (("mfu_pct by palm", found["nanotron"].used),)


def test_mixtures_are_read_by_name(tmp_path: Path) -> None:
    cells = {
        "tp": "1",
        "pp": "2",
        "dp": "8",
        "ep": "8",
        "recompute": "",
        "group": "megatron-bridge",
        "gbs": "64",
        "zero_stage": "1",
    }
    for name, experts, active in (
        ("GPT OSS 120B", 128, 4),
        ("DeepSeekV3 (w/o MTP)", 256, 8),
        ("Qwen3_235B_a22B", 128, 8),
        ("Kimi_K2", 384, 8),
    ):
        run = read_one(tmp_path, **cells, model=name, n_gpus="16")
        assert run.used, run.reason
        assert run.model is not None and run.model.experts is not None and run.layout is not None
        assert (run.model.experts.count, run.model.experts.active, run.layout.ep) == (experts, active, 8)
        # The source's recipes recompute next to nothing; other sources would have to say so.
        assert run.recompute == "none" and "no recomputation" in run.assumed
    # Its example run files say what a table leaves out.
    primus = read_one(tmp_path, **cells | {"group": "amd-primus", "zero_stage": ""}, model="Mixtral-8x22B", n_gpus="16")
    assert primus.used and primus.layout is not None and (primus.recompute, primus.layout.zero) == ("none", 1)
    elsewhere = read_one(tmp_path, **cells | {"group": "g"}, model="GPT OSS 120B", n_gpus="16")
    assert elsewhere.reason == "the source does not state whether activations are recomputed"
