"""Communication of a real block on two gloo ranks against its trace."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_ranks import run_ranks
from phalanx.config.model import LanguageModel
from phalanx.families.language.declare import DeclaredLanguage
from phalanx.families.language.decoder import Decoder
from phalanx.layout.context_parallel.split_context import SequenceShare, split_context
from phalanx.layout.mesh import build_mesh
from phalanx.layout.prepare_blocks import recompute_block
from phalanx.layout.spec import ResolvedLayout
from phalanx.layout.tensor_parallel.split_layers import split_tensors
from phalanx.nn.splits import ModelChunk
from phalanx.planner.trace.operations import COLLECTIVES, base_name
from phalanx.planner.trace.part_costs import part_costs
from phalanx.planner.trace.traced_model import Setting
from small_models import LLAMA

LENGTH, SAMPLES = 32, 2
CASES: list[tuple[int, int, Any]] = [(2, 1, "none"), (2, 1, "full"), (1, 2, "none")]


class Communication(TorchDispatchMode):
    """Operation and bytes of every functional collective."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = base_name(func)
        if name in COLLECTIVES:
            self.found.append((COLLECTIVES[name], max(args[0].nbytes, result.nbytes)))
        return result


def communicate(model: LanguageModel, tp: int, cp: int, recompute: Any) -> list[tuple[str, int]]:
    mesh = build_mesh(ResolvedLayout(SAMPLES, tp=tp, cp=cp), torch.device("cpu"))
    with torch.device("meta"):
        part = Decoder(model, part=ModelChunk(range(1), first=False, last=False))
    split_tensors(part, DeclaredLanguage(model, 1).splits(), mesh.tp)
    share = SequenceShare(mesh.cp, mesh.tp, "all_to_all")
    split_context(part, share)
    part.to_empty(device="cpu")
    for parameter in part.parameters():
        torch.nn.init.ones_(parameter)
    (block,) = part.blocks
    recompute_block(block, recompute)
    positions = share.positions(LENGTH, torch.device("cpu"))
    context = part.attention_context(model.layer(0).attention, positions.tokens_S, torch.float32)
    x = torch.randn(SAMPLES, LENGTH // (tp * cp), model.d_model, requires_grad=True)
    with Communication() as seen:
        block(x, context).sum().backward()
    return seen.found


def test_traced_communication_is_that_of_real_ranks() -> None:
    for tp, cp, recompute in CASES:
        (first, _) = run_ranks(communicate, 2, LLAMA, tp, cp, recompute)
        chosen = Setting(
            LLAMA, LENGTH, tp=tp, cp=cp, context="all_to_all", recompute=recompute, precision="fp32", attention="cpu"
        )
        for compiled in (False, True):
            costs = part_costs("block", Setting(**{**vars(chosen), "compile": compiled}), SAMPLES).costs
            traced = [(c.operation, c.bytes) for c in costs.collectives()]
            assert sorted(traced) == sorted(first), (tp, cp, recompute, compiled)
