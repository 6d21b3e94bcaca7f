"""Memory of one block and of the head, as the cost model reads it off their traces and as an accelerator allocates it.

    python benchmarks/block_costs.py --out results.json

One part at a time, in bfloat16 on one device, uncompiled and compiled, with every choice of recompute. Kept: allocated
after the forward pass, without the result. Peaks: most allocated during a pass, with the same exclusions as in
`phalanx.planner.schedule.timeline.Costs`. Milliseconds are medians of ten passes and are no prediction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from phalanx.config.model import LanguageModel
from phalanx.layout.layout_model import TrainingPass
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.nn.attention import Attention, attend
from phalanx.planner.trace import part_costs as parts
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import PartName, Setting, build_stage, example_batch

MODELS = {
    "llama3-8b": LanguageModel(
        n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336, vocab_size=128256, max_positions=8192
    ),
    "gpt-6.7b": LanguageModel(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        vocab_size=50304,
        max_positions=8192,
        positions="learned",
        norm="layernorm",
        mlp="gelu_tanh",
        bias=True,
    ),
}
LENGTH = 8192
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for name, model in MODELS.items():
        for compiled, samples in itertools.product((False, True), (1, 2)):
            cases: list[tuple[PartName, str]] = [("block", mode) for mode in ("none", "selective", "full")]
            for part, recompute in [*cases, ("head", "none")]:
                setting = Setting(model, LENGTH, recompute=recompute, compile=compiled)  # type: ignore[arg-type]
                row = {"model": name, "part": part, "recompute": recompute, "compiled": compiled, "samples": samples}
                row |= compare(part, setting, samples)
                print(json.dumps(row), flush=True)
                rows.append(row)
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def compare(part: PartName, setting: Setting, samples: int) -> dict[str, Any]:
    """Predicted and measured mebibytes, and what they differ by in percent."""
    predicted = part_costs(part, setting, samples).costs
    made = predicted.kept_bytes - predicted.input_bytes
    found = measure(part, setting, samples)
    expected = {"kept": made, "forward_peak": predicted.forward_peak, "backward_peak": predicted.backward_peak}
    row: dict[str, Any] = {}
    for key, value in expected.items():
        row[key] = [round(value / 2**20, 1), round(found[key] / 2**20, 1)]
        row[key + "_error_percent"] = round(100 * (value / found[key] - 1), 2) if found[key] > 2**20 else 0.0
    return row | {"forward_ms": found["forward_ms"], "backward_ms": found["backward_ms"]}


def measure(part: PartName, setting: Setting, samples: int) -> dict[str, float]:
    """Bytes and milliseconds of real passes."""
    run, x, modules = prepare(part, setting, samples)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    records: list[dict[str, float]] = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(13):
            for tensor in (x, *parameters):
                tensor.grad = None
            records.append(one_pass(run, x))
    last = records[3:]
    result = dict(last[-1])
    for key in ("forward_ms", "backward_ms"):
        result[key] = round(statistics.median(record[key] for record in last), 3)
    return result


def one_pass(run: Callable[[], Tensor], x: Tensor) -> dict[str, float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    events[0].record()
    y = run()
    events[1].record()
    torch.cuda.synchronize()
    size = y.untyped_storage().nbytes()
    kept = torch.cuda.memory_allocated() - before - size
    forward_peak = torch.cuda.max_memory_allocated() - before
    incoming = torch.ones_like(y)
    torch.cuda.reset_peak_memory_stats()
    events[2].record()
    y.backward(incoming)
    events[3].record()
    torch.cuda.synchronize()
    backward_peak = torch.cuda.max_memory_allocated() - before + x.untyped_storage().nbytes() - size
    return {
        "kept": kept,
        "forward_peak": forward_peak,
        "backward_peak": backward_peak,
        "forward_ms": events[0].elapsed_time(events[1]),
        "backward_ms": events[2].elapsed_time(events[3]),
    }


def prepare(part: PartName, setting: Setting, samples: int) -> tuple[Callable[[], Tensor], Tensor, list[nn.Module]]:
    """A call of the part on the device, its input, and its modules."""
    torch._dynamo.reset()
    stage = build_stage(part, setting)
    if part == "head":
        batch = tree_map(real, example_batch(part, stage, setting, samples))
        if setting.compile:
            stage.part.head.loss_kernel = torch.compile(stage.part.head.loss_kernel)
        fill(stage)
        return lambda: stage(**batch, training=TrainingPass(step=1)), batch["x"], [stage]
    arguments = tree_map(real, parts.block_arguments(stage, example_batch("block", stage, setting, samples)))
    (block,) = stage.part.blocks
    for module in block.modules():
        if isinstance(module, Attention):
            module.attend = attend
    recompute_block(block, setting.recompute)
    if setting.compile:
        block.compile()
    fill(block)
    return lambda: block(*arguments), arguments[0], [block]


def fill(module: nn.Module) -> None:
    module.to_empty(device=DEVICE)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)


def real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.zeros(value.shape, dtype=value.dtype, device=DEVICE)
    if value.is_floating_point():
        nn.init.normal_(made)
    return made.requires_grad_(value.requires_grad)


if __name__ == "__main__":
    main()
