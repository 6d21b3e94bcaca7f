"""What Megatron-Bridge's recipe of a run does, by release, model, device and format.

Each fact stands in NVIDIA-NeMo/Megatron-Bridge at the release's tag: scripts/performance/run_script.py in v0.1.0 (25.09),
scripts/performance/configs/*/*workload_base_configs.py in v0.2.0 (25.11), v0.3.0 (26.02), v0.3.1 (26.02.01), v0.4.0 (26.04),
v0.4.1, v0.5.0 (26.06) and v0.5.1, src/megatron/bridge/perf_recipes in v0.6.0 (26.08); docs/releases/software-versions.md
says which is which. A row of the table of runs that does not fit a recipe's layout is taken to follow it in all else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.planner.time.framework import FrameworkProfile
from published.frameworks import OtherFramework
from published.runs import PublishedRun

Release = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """What recipes of one model on some devices do from one release on, up to one."""

    model: str
    """How its name begins, in lower case with underscores."""
    devices: tuple[str, ...] = ()
    """Any, where there are none."""
    since: Release = (25, 9)
    until: Release = (99,)
    mxfp8: bool = False
    """Whether only runs in MXFP8 do so."""
    dispatches: bool = False
    """Rows go once to each rank by one kernel, HybridEP's or DeepEP's (`moe_flex_dispatcher_backend`), else by NCCL."""
    hides_rows: bool = False
    """Behind another micro-batch's computing (`moe_a2a_overlap`)."""
    fused: bool = False
    """Experts' products have the activation function in them (`cutedsl_fused_grouped_mlp`)."""
    attention: bool = False
    """Attention in 8 bits (`fp8_dot_product_attention`)."""
    head: bool = False
    """The head in 8 bits (`fp8_output_proj`)."""
    recomputes: bool = False
    """The activation function between experts' products (`moe_act` in `recompute_modules`)."""


_RACKS = ("GB200", "GB300")
_NODES = ("B200", "B300")


def _whole_steps(model: str, devices: tuple[str, ...], *, attention: bool = True, head: bool = False) -> Recipe:
    """Return a recipe that records whole steps (`cuda_graph_impl="full_iteration"`)."""
    return Recipe(
        *(model, devices, (26, 6)),
        mxfp8=True,
        dispatches=True,
        hides_rows=True,
        fused=True,
        attention=attention,
        head=head,
    )


_RECIPES = (
    _whole_steps("gpt_oss", _RACKS, head=True),
    Recipe("gpt_oss", ("GB200",), since=(26, 4), until=(26, 6), dispatches=True, hides_rows=True, recomputes=True),
    Recipe("gpt_oss", ("B300",), since=(26, 4), dispatches=True),
    Recipe("gpt_oss", ("B200",), since=(26, 4), until=(26, 6), dispatches=True, recomputes=True),
    Recipe("gpt_oss", ("GB200", "B200", "H100 SXM"), recomputes=True),
    _whole_steps("qwen3_30b", (*_RACKS, "B300")),
    Recipe("qwen3_30b", (*_RACKS, "B300"), since=(25, 11), dispatches=True),
    Recipe("qwen3_30b", ("B200",), since=(26, 2, 1), dispatches=True),
    # DeepEP is named from 26.02 on, but its container lacks it (docs/releases/known-issues.md).
    Recipe("qwen3_30b", ("H100 SXM",), since=(25, 11), until=(26, 2, 1), hides_rows=True),
    _whole_steps("qwen3_235b", _RACKS),
    Recipe("qwen3_235b", _RACKS, since=(25, 11), dispatches=True),
    Recipe("qwen3_235b", ("H100 SXM",), since=(26, 2, 1), until=(26, 4), dispatches=True, hides_rows=True),
    Recipe("qwen3_235b", ("H100 SXM",), since=(25, 11), hides_rows=True),
    _whole_steps("deepseek", ("GB300",), head=True),
    _whole_steps("deepseek", ("GB200",), attention=False, head=True),
    Recipe("deepseek", ("GB300",), since=(25, 11), until=(26, 2), dispatches=True, recomputes=True),
    Recipe("deepseek", _RACKS, since=(25, 11), dispatches=True),
    Recipe("deepseek", _NODES, since=(26, 2), dispatches=True),
    # Until 26.06 no steps are recorded. Its optimizer, Muon, is planned as AdamW.
    Recipe("kimi", _RACKS, since=(26, 2, 1), until=(26, 8), dispatches=True),
)
"""The first that fits counts."""
_NOTHING = Recipe("")


def with_recipe(framework: FrameworkProfile, run: PublishedRun) -> FrameworkProfile:
    """Return what Megatron-Bridge's recipe for a run changes; other programs as they are."""
    if not isinstance(framework, OtherFramework) or not run.framework.startswith("Megatron-Bridge"):
        return framework
    name = run.model_name.lower().replace(" ", "_")
    recipe = next((one for one in _RECIPES if _fits(one, run, name)), _NOTHING)
    return replace(
        framework,
        biased_experts=name.startswith("gpt_oss"),
        recomputes_activation=recipe.recomputes,
        fused_experts=recipe.fused,
        attention_exponentials=_EXPONENTIALS[run.device or ""] if recipe.attention else 0.0,
        head_in_8_bits=recipe.head,
        rows_once_a_rank=recipe.dispatches,
        hides_rows=recipe.hides_rows,
        # `tp_comm_overlap` with buffers by device and size, in every release.
        hides_tp=name.startswith("llama"),
    )


def _fits(recipe: Recipe, run: PublishedRun, name: str) -> bool:
    release = tuple(int(part) for part in run.framework.split()[-1].split("."))
    device = not recipe.devices or run.device in recipe.devices
    known = recipe.since <= release < recipe.until and (run.precision == "mxfp8" or not recipe.mxfp8)
    return name.startswith(recipe.model) and device and known


_EXPONENTIALS = {"B200": 16.0, "GB200": 16.0, "B300": 32.0, "GB300": 32.0}
"""A clock and multiprocessor: 16 on a B200, as on an H100, twice as many on a B300 (FlashAttention-4, arXiv:2603.05451)."""
