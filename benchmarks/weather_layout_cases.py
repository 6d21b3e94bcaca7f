"""The cases of `weather_layouts.py`, and what the planner says of each before it runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from layout_speed import ROOT
from phalanx.config.load import load_run
from phalanx.config.schema import Run
from phalanx.families.registry import bind
from phalanx.hardware.device_facts import device_facts
from phalanx.hardware.machine import Machine
from phalanx.layout.resolve import resolve_layout
from phalanx.layout.spec import ResolvedLayout
from phalanx.nn.precision import PRECISIONS
from phalanx.planner.memory.model import Kernels, memory
from phalanx.planner.memory.probability import BESIDE, GIB, Beside, communicators, fits
from phalanx.planner.plan.compare_layouts import break_even
from phalanx.planner.time.profile import NamedProfile
from phalanx.planner.time.step_time import StepBreakdown
from phalanx.planner.time.timing import our_framework, step_times
from phalanx.planner.trace.streamed_block import chain_sizes
from phalanx.planner.trace.traced_model import Kernel, TracedModel

RUN_FILE = ROOT / "examples/orbit-1b.yaml"
Words = list[str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A forecaster, and how much of it a step computes."""

    name: str
    fields: dict[str, str]
    tiny: dict[str, str]
    """In place of `fields` on CPU ranks, over `TINY`."""
    samples: int
    """A device and micro-batch: by itself, or its share of what ranks of `tp` compute together."""
    accumulation: int
    """Micro-batches a step. Many of few samples, so that what a step costs once does not hide what a layout costs."""
    layouts: tuple[str, ...]
    last: bool = False
    """Whether it is measured after the widths."""


ALL = ("hybrid-stream", "hybrid-layer", "fsdp", "tp")
"""The youngest first."""
_WIDE = {"model.d_model": "256", "model.n_heads": "16"}
MODELS = (
    Model("orbit-1b 1 x 8", {"model.preset": "orbit-1b"}, {}, 1, 8, ALL),
    Model("orbit-1b 8 x 2", {"model.preset": "orbit-1b"}, {}, 8, 2, ALL),
    Model("orbit-10b 1 x 4", {"model.preset": "orbit-10b"}, _WIDE, 1, 4, ("hybrid-stream", "hybrid-layer", "fsdp")),
    Model(
        "orbit-10b patch 8 1 x 4",
        {"model.preset": "orbit-10b", "model.patch_size": "8"},
        _WIDE | {"model.patch_size": "4"},
        1,
        4,
        ("hybrid-layer", "fsdp"),
        last=True,
    ),
)
TINY = {
    "model.preset": "null",
    "model.family": "weather",
    "model.n_layers": "2",
    "model.d_model": "128",
    "model.n_heads": "8",
    "model.n_lat": "8",
    "model.n_lon": "16",
    "model.patch_size": "2",
    "model.qk_norm": "true",
    "model.variables": "[2m_temperature, geopotential_500, temperature_850]",
    "data.inputs": "[2m_temperature, geopotential_500, temperature_850]",
    "training.compile": "false",
    "cluster.device": "cpu",
}


def layouts(devices: int, tp: int) -> dict[str, str]:
    """Layouts by name; hybrid ones split matrices over `tp` devices, and shard over the others."""
    hybrid = f"tp={tp} dp_shard={devices // tp}"
    return {
        "fsdp": f"tp=1 dp_shard={devices}",
        "tp": f"tp={devices} dp_shard=1",
        "hybrid-layer": f"{hybrid} gather=layer",
        "hybrid-stream": f"{hybrid} gather=stream",
    }


def case_words(layout: str, model: Model, options: argparse.Namespace) -> Words:
    """The run file's overrides of a case."""
    tp = int(dict(word.split("=") for word in layout.split())["tp"])
    fields = {**TINY, **model.tiny} if options.tiny else model.fields
    return [
        *(f"{name}={value}" for name, value in fields.items()),
        *(f"layout.{word}" for word in layout.split()),
        f"layout.microbatch={model.samples * tp}",
        f"layout.global_batch={model.samples * options.devices * model.accumulation}",
        "layout.dp_replicate=1",
        f"layout.recompute={options.recompute}",
        f"cluster.devices_per_node={options.devices}",
        "optimizer.warmup_steps=2",
        "evaluation.every=null",
        *options.set,
    ]


def width_words(layout: str, width: int, options: argparse.Namespace) -> Words:
    """The same for a model of this width, with heads of the preset's size."""
    wide = {"model.d_model": str(width), "model.n_heads": str(width // head_size(options))}
    model = Model("width", {"model.preset": "orbit-1b"} | wide, wide, 1, 1, ())
    return [*case_words(layout, model, options), "layout.recompute=full", "training.compile=false"]


def head_size(options: argparse.Namespace) -> int:
    """Of the preset."""
    return 16 if options.tiny else 192


def width_grid(options: argparse.Namespace) -> int:
    """Widths tried are multiples of this: whole heads on every rank of `tp`."""
    return head_size(options) * int(options.devices)


def predict(words: Words, devices: int, machine: Machine, named: NamedProfile) -> Row:
    """Step time, memory, and the closed form of gathered weights."""
    run = load_run(RUN_FILE, words)
    layout = resolve_layout(bind(run), devices, devices)
    one = layout.table
    kernel = _kernel(run, machine)
    constants = named.collectives_on(machine)
    times = step_times(bind(run, TracedModel), one, machine, named.profile, constants=constants, attention=kernel)
    seconds = float(times.total[0])
    return {
        "step_seconds": seconds,
        "samples_per_second": layout.global_batch / seconds,
        "seconds_by_cause": {
            component.name.lower(): round(float(times.of(component)[0]), 6)
            for component in StepBreakdown
            if times.of(component)[0]
        },
        **predict_memory(words, devices, machine, named),
        "gathered_weights": gathered_weights(run, layout, kernel),
    }


def predict_memory(words: Words, devices: int, machine: Machine, named: NamedProfile) -> Row:
    """Peak of live tensors on the worst rank, with the buffers that peers read, and the chance that all of it fits."""
    run = load_run(RUN_FILE, words)
    layout = resolve_layout(bind(run), devices, devices)
    kernels = Kernels(_kernel(run, machine), run.training.compile is not False)
    one = layout.table
    found = memory(
        bind(run, TracedModel), one, kernels, peer_copies=our_framework(bind(run, TracedModel), machine).copy_engines
    )
    chance = None
    if machine.node.device != "CPU":
        beside = (
            BESIDE["cuda"] if named.beside is None else Beside(named.beside["context"], named.beside["communicator"])
        )
        size = device_facts(machine.node.device).memory_bytes
        assert size is not None
        chance = float(fits(found.allocated, communicators(one), size, beside, found.peer_buffers)[0])
    return {"memory_gib": float(found.held[0]) / GIB, "chance_to_fit": chance}


def gathered_weights(run: Run, layout: ResolvedLayout, kernel: Kernel) -> Row:
    """Bytes of gathered weights by closed form: two blocks, or two chunks of the larger chain.

    promised: 2 P / (T F) of that chain, for either kind of gathering; of a block: the same of all its chains.
    """
    if layout.shards == 1:
        return {"peak": 0}
    width = PRECISIONS[run.layout.precision].compute_dtype.itemsize
    streamed = run.model_copy(update={"layout": run.layout.model_copy(update={"gather": "stream"})})
    setting = bind(streamed, TracedModel).setting_of(
        resolve_layout(bind(streamed), layout.world_size), attention=kernel, compiled=False
    )
    chains = chain_sizes(setting)
    split = [sum(chain.plan.chunk_size(k) for k in range(chain.plan.chunks)) for chain in chains]
    stream = layout.gather == "stream"
    return {
        "peak": 2 * width * (max(chain.chunk for chain in chains) if stream else sum(split)),
        "promised": 2 * width * max(split) // layout.shards,
        "promised_of_a_block": 2 * width * sum(split) // layout.shards,
    }


def _kernel(run: Run, machine: Machine) -> Kernel:
    return (
        "cpu"
        if machine.node.device == "CPU"
        else bind(run, TracedModel).likely_kernel(rocm=machine.node.device.startswith("MI"))
    )


def widest(layout: str, options: argparse.Namespace, machine: Machine, named: NamedProfile) -> int:
    """The largest width that fits at least as likely as not."""
    grid = width_grid(options)

    def fit(steps: int) -> bool:
        found = predict_memory(width_words(layout, steps * grid, options), options.devices, machine, named)
        if found["chance_to_fit"] is None:
            return bool(found["memory_gib"] <= options.room_gib)
        return bool(found["chance_to_fit"] >= 0.5)

    low, high = 1, 2
    while high < 256 and fit(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low * grid


def plan_rows(rows: list[Row], options: argparse.Namespace, machine: Machine, named: NamedProfile) -> None:
    """Add all cases that `rows` lacks, each with its prediction."""
    known = {row["case"] for row in rows}
    for model in MODELS:
        for name in model.layouts:
            case, layout = f"{model.name} {name}", layouts(options.devices, options.tp)[name]
            if case not in known:
                words = case_words(layout, model, options)
                predicted = predict(words, options.devices, machine, named)
                rows.append({"case": case, "last": model.last, "words": words, "predicted": predicted})
    for name in () if options.no_width else ALL:
        case, layout = f"{name} width", layouts(options.devices, options.tp)[name]
        if case not in known:
            width = widest(layout, options, machine, named)
            near = {
                tried: predict_memory(width_words(layout, tried, options), options.devices, machine, named)
                for tried in (width, width + width_grid(options))
            }
            rows.append({"case": case, "layout": layout, "predicted_width": width, "predicted": near, "tries": {}})


def break_evens(options: argparse.Namespace, machine: Machine) -> Row:
    """Tokens a device below which Hybrid-STOP sends less than FSDP, by model."""
    found: Row = {}
    for model in MODELS:
        run = load_run(RUN_FILE, case_words(layouts(options.devices, options.tp)["hybrid-layer"], model, options))
        copies = our_framework(bind(run, TracedModel), machine).copy_engines
        tp = run.layout.tp
        assert isinstance(tp, int)
        even = (
            break_even(bind(run, TracedModel), tp, options.devices // tp, run.layout.recompute, peer_copies=copies)
            if tp > 1
            else None
        )
        found[model.name] = even and {"tp": tp, "positions_per_device": even.positions}
    return found
