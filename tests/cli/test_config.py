"""`phalanx config`: what it prints for people, for programs and for the guide."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import Call
from config.run_text import RUN
from phalanx.config.families import sizes_of
from phalanx.config.load import load_run, parse_run
from phalanx.config.presets import load_preset, preset_names, recipe_names
from token_data import write_run_file, write_token_folder

DOCS = Path(__file__).parents[2] / "docs" / "reference"
QUICKSTART = DOCS.parents[1] / "examples" / "quickstart.yaml"


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    return str(file)


def test_list_shows_every_preset_and_its_source(call: Call) -> None:
    outcome = call("config", "list")
    assert outcome.code == 0 and outcome.err == ""
    table, _, others, sources, recipes = outcome.out.split("\n\n")
    listed = [line.split()[0] for part in (table, others) for line in part.splitlines()[1:]]
    assert sorted(listed) == sorted(preset_names())
    assert ["llama3-8b", "8.03B", "32", "4096", "32/8", "128256", "8192"] in [
        line.split() for line in table.splitlines()
    ]
    assert "arXiv:2312.12705" in sources
    assert [line.split()[0] for line in recipes.splitlines() if line.startswith("  ") and line[2] != " "] == list(
        recipe_names()
    )
    assert "MPT-1B on 26B tokens" in recipes


def test_list_of_one_preset(call: Call) -> None:
    outcome = call("config", "list", "mpt-7b")
    assert "6,649,024,512" in outcome.out and "6.6589B" in outcome.out and "positions      alibi" in outcome.out
    unknown = call("config", "list", "mpt-7")
    assert (unknown.code, unknown.err) == (
        2,
        "error: mpt-7 is not a preset\n       nearest: mpt-7b, mpt-70b, mpt-760m\n",
    )


def test_list_json(call: Call) -> None:
    listed = json.loads(call("config", "list", "--json").out)
    presets = listed["presets"]
    assert [recipe["name"] for recipe in listed["recipes"]] == list(recipe_names())
    assert [preset["name"] for preset in presets] == list(preset_names())
    by_name = {preset["name"]: preset for preset in presets}
    assert by_name["gpt2"]["parameters"] == 124_439_808
    assert by_name["gpt2"]["model"]["n_layers"] == 12


def test_show_prints_a_run_file_that_loads_back(call: Call, run_file: str) -> None:
    outcome = call("config", "show", run_file, "training.steps=9")
    assert outcome.code == 0
    assert parse_run(outcome.out, "shown") == load_run(Path(run_file), ["training.steps=9"])


def test_show_json_is_the_resolved_run(call: Call, run_file: str) -> None:
    shown = json.loads(call("config", "show", run_file, "--json").out)
    assert shown == load_run(Path(run_file)).model_dump(mode="json")


def test_the_list_says_which_presets_hold_less_than_they_are_named_for(call: Call) -> None:
    shown = " ".join(call("config", "list").out.split())
    assert "orbit-113b has 102B" in shown
    unlike = set(re.findall(r"(\S+) has [0-9.]+[KMBT]", shown))
    for name in preset_names():
        preset = load_preset(name)
        if preset.named_size is not None and name not in unlike:
            assert sizes_of(preset.model()).parameter_count(preset.model()) == pytest.approx(
                preset.named_size, rel=0.045
            )
    assert unlike == {"gnn-mace-1m", "mpt-1b", "mpt-3b", "mpt-7b", "mpt-70b", "orbit-10b", "orbit-113b"}


def test_check_prints_what_follows(call: Call, run_file: str) -> None:
    assert call("config", "check", run_file, "--no-data").out == (
        f"{run_file} is sound\n"
        "  model         llama3-8b: 4 layers x 4096, 32 heads (8 kv), vocabulary 128,256\n"
        "  parameters    1,923,125,248 (1.40B in matmuls)\n"
        "  layout        one rank microbatch=2 x 128\n"
        "  global batch  256 samples x 2,048 = 524,288 tokens\n"
        "  run           100 steps, 52.4M tokens, 0.0273 a parameter\n"
        "  model FLOPs   4.5e+17 (8.59B a token; causal: attention halved)\n"
    )


def test_check_warns_of_too_few_tokens_a_parameter(call: Call, run_file: str) -> None:
    few = call("config", "check", run_file, "--no-data")
    assert few.code == 0
    assert few.err.startswith("warning: 0.027 tokens a parameter: ")
    # 1,923,125,248 parameters and 524,288 tokens a step: 367 steps are the first with a tenth of a token for each
    assert "warning" in call("config", "check", run_file, "--no-data", "training.steps=366").err
    assert call("config", "check", run_file, "--no-data", "training.steps=367").err == ""


def test_check_json(call: Call, run_file: str) -> None:
    facts = json.loads(call("config", "check", run_file, "--no-data", "--json", "training.flops=palm").out)
    matmul = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096
    per_token = 6 * matmul + 12 * 4 * 4096 * 2048
    assert facts["matmul_parameters"] == matmul and facts["flops_per_token"] == per_token
    assert facts["tokens"] == 100 * 524288 and facts["flops"] == per_token * 100 * 524288
    assert facts["flops_convention"] == "palm"
    assert facts["active_parameters"] == facts["parameters"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("pp=99", "layout.pp=99 x layout.stages_per_rank=1 = 99 stages, more than the model.n_layers=4 layers"),
        ("tp=3", "layout.tp=3 does not divide model.d_ff (512, in 32 parts of 16 that stay together)"),
        ("--nproc 3", "layout.global_batch=16 samples is not a multiple of 3 data-parallel ranks"),
        ("--devices 4 tp=8", "layout.tp=8 does not divide the world size 4"),
        ("tp=auto pp=auto", "layout.tp and layout.pp are both auto"),
    ],
)
def test_check_refuses_layouts_that_training_would_refuse(words: str, reason: str, call: Call) -> None:
    outcome = call("config", "check", str(QUICKSTART), "--no-data", *words.split())
    assert outcome.code == 2 and outcome.out == ""
    assert reason in outcome.err


def test_check_knows_the_heads_of_every_family(call: Call) -> None:
    outcome = call("config", "check", str(QUICKSTART.parent / "orbit-113b.yaml"), "--no-data", "layout.tp=128")
    assert outcome.code == 2 and "layout.tp=128 does not divide model.n_heads (64 parts)" in outcome.err


def test_check_says_the_layout_of_so_many_ranks(call: Call) -> None:
    alone = json.loads(call("config", "check", str(QUICKSTART), "--no-data", "--json").out)
    assert (alone["ranks"], alone["layout"], alone["data"]) == (1, "one rank microbatch=16 x 1 (auto)", None)
    shown = call("config", "check", str(QUICKSTART), "--no-data", "--nproc", "8", "tp=2").out
    assert "  layout        8 ranks: dp_shard=4 tp=2 reshard_after_forward=True microbatch=4 x 1 (auto)\n" in shown
    # The fewest ranks over which this batch divides are not the fewest that the degrees allow.
    words = ["global_batch=11", "microbatch=1", "pp=2", "schedule=interleaved_1f1b", "layout.stages_per_rank=2"]
    assert json.loads(call("config", "check", str(QUICKSTART), "--no-data", "--json", *words).out)["ranks"] == 22


def test_check_looks_for_the_data(call: Call, tmp_path: Path) -> None:
    missing = call("config", "check", str(QUICKSTART), "data.sources=[nosuch]", "tp=3")
    assert missing.code == 2
    assert "nosuch: nothing there" in missing.err and "--no-data" in missing.err
    assert "layout.tp=3 does not divide" in missing.err
    run = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    shown = call("config", "check", str(run))
    assert shown.code == 0 and re.search(r"^  data          [0-9,]+ tokens$", shown.out, re.MULTILINE)
    small = call("config", "check", str(run), "model.vocab_size=9")
    assert small.code == 2 and "raise model.vocab_size" in small.err


@pytest.mark.parametrize(
    ("example", "missing"),
    [("storm-1996.yaml", "nothing there"), ("materials-xtb.yaml", "prepare the source first")],
)
def test_check_looks_for_the_data_of_every_family(
    example: str, missing: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = call("config", "check", str(QUICKSTART.parent / example))
    assert outcome.code == 2 and missing in outcome.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["training.freeze=[nosuch.*]"], "training.freeze"),
        (["optimizer.lr_ratios={nosuch.*: 0.5}"], "optimizer.lr_ratios"),
        (["training.lora.rank=2", "training.lora.matrices=[nosuch.*]"], "training.lora.matrices"),
        (["training.init_from=nosuch"], "training.init_from"),
    ],
)
def test_check_asks_the_model_for_parameters_that_fields_name(
    words: list[str], named: str, call: Call, tmp_path: Path
) -> None:
    run = write_run_file(tmp_path / "run.yaml", write_token_folder(tmp_path / "data"))
    outcome = call("config", "check", str(run), *words)
    assert outcome.code == 2 and named in outcome.err and "nosuch" in outcome.err


LOADED = "import sys\nfrom phalanx.cli.main import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"


def test_text_is_checked_without_torch(tmp_path: Path) -> None:
    """Its import alone takes longer than the whole check may."""
    data = write_token_folder(tmp_path / "text")
    file = write_run_file(tmp_path / "run.yaml", data)
    command = [sys.executable, "-c", LOADED, "config", "check", str(file), "layout.dp_shard=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "2 ranks: dp_shard=2" in done.stdout and " tokens\n" in done.stdout, done.stderr
    assert not {"torch", "scipy"} & set(done.stderr.split())


def test_check_of_a_wrong_file(call: Call, run_file: str) -> None:
    outcome = call("config", "check", run_file, "layout.microbach=1", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: layout.microbach=1: there is no such field\n       nearest: layout.microbatch\n"


def test_fields(call: Call) -> None:
    one = call("config", "fields", "layout").out
    assert (
        "  layout.tp_across_nodes = false\n      Whether tensor-parallel groups may span nodes (slow on most networks). May "
        "be true or false.\n" in one
    )
    assert "  layout.global_batch required\n" in one and "optimizer" not in one.split("\n")[0]
    everything = call("config", "fields").out
    assert one in everything and "training.profile.first required" in everything
    facts = json.loads(call("config", "fields", "layout", "--json").out)["sections"]
    assert [section["name"] for section in facts] == ["layout"]
    assert call("config", "fields", "layuot").err == "error: layuot is not a section\n       nearest: layout\n"


@pytest.mark.parametrize(
    ("guide", "command"), [("run_file.md", "config fields --markdown"), ("presets.md", "config list --markdown")]
)
def test_guide_holds_the_current_table(guide: str, command: str, call: Call) -> None:
    text = (DOCS / guide).read_text("utf-8")
    table = text.partition(f"<!-- phalanx {command} -->\n")[2].partition("<!-- end -->")[0]
    assert table.strip() == call(*command.split()).out.strip(), (
        f"paste the output of phalanx {command} into docs/reference/{guide}"
    )


def test_first_run_file_of_the_guide_is_sound(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text((DOCS / "run_file.md").read_text("utf-8").split("```yaml\n")[1].split("```")[0])
    assert call("config", "check", str(file), "--no-data").code == 0


@pytest.mark.parametrize("example", sorted((DOCS.parents[1] / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_sound(example: Path, call: Call) -> None:
    outcome = call("config", "check", str(example), "--no-data")
    assert outcome.code == 0
    # Those of large models show a layout in few steps.
    assert outcome.err == "" or (outcome.err.startswith("warning: ") and "tokens a parameter" in outcome.err)


def test_names_that_no_package_offers_are_told_all_at_once(call: Call) -> None:
    changes = ("optimizer.name=adamv", "training.callbacks=[diary]")
    outcome = call("config", "check", str(QUICKSTART), "--no-data", *changes)
    assert outcome.code == 2 and outcome.out == ""
    assert "optimizer.name=adamv: no such entry of phalanx.optimizers; did you mean adamw? known: adamw" in outcome.err
    assert "training.callbacks.0.name=diary: no such entry of phalanx.callbacks" in outcome.err
