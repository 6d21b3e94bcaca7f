"""A small model laid out on the ranks of a test, a backward pass over the same samples, and parts joined to wholes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from layout_runs import Fields, run_with
from phalanx.families.language.config import LanguageRun
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.registry import bind
from phalanx.layout.apply import ParallelModel, apply_layout
from phalanx.layout.context_parallel.kernel_choice import AttentionChoice
from phalanx.layout.execute import Executor
from phalanx.layout.layout_model import LayoutModel
from phalanx.layout.mesh import ONE_RANK, Groups, Mesh, build_mesh
from phalanx.layout.place import Place, TensorSplits, place_of
from phalanx.layout.spec import ResolvedLayout

CPU = torch.device("cpu")
GPT: Fields = {
    "model.positions": "learned",
    "model.norm": "layernorm",
    "model.mlp": "gelu_tanh",
    "model.bias": True,
    "model.tied_head": True,
}
"""Changes that make the small model one with biases and a tied head."""

Box = tuple[tuple[int, ...], tuple[int, ...], Tensor]
"""Offsets, whole shape and elements of one rank's part."""


def whole_run(changes: Fields) -> LanguageRun:
    """The small run in float64, 8 samples a step."""
    return run_with(changes, precision="fp64", global_batch=8)


def laid_out(run: LanguageRun, layout: ResolvedLayout, made: Groups | None = None) -> ParallelModel:
    """`run`'s model in `layout`, on this rank of the process group."""
    mesh = ONE_RANK if layout.world_size == 1 else build_mesh(layout, CPU, made)
    return apply_layout(bind(run, LayoutModel), layout, mesh, CPU, AttentionChoice("sdpa"))


def samples_of(run: LanguageRun, layout: ResolvedLayout, mesh: Mesh) -> TokenBatch:
    """This rank's share of the samples of a step, which do not depend on the layout."""
    length = run.data.sequence_length
    random = torch.Generator().manual_seed(11)
    tokens = torch.randint(run.model.vocab_size, (layout.global_batch, length + 1), generator=random)
    first = mesh.data_rank * layout.samples_per_rank
    mine = slice(first, first + layout.samples_per_rank)
    indices = torch.arange(layout.global_batch)
    return TokenBatch(tokens[mine, :-1], tokens[mine, 1:], None, indices[mine])


def backward(run: LanguageRun, applied: ParallelModel) -> Tensor:
    """Gradients of the mean loss of a step; returns this rank's part of the summed loss."""
    scale = 1.0 / (8 * run.data.sequence_length)
    return Executor(applied).forward_backward(1, samples_of(run, applied.layout, applied.mesh), scale).sum()


def box(place: Place) -> Box:
    """A part that can leave its process."""
    return place.offsets, place.shape, place.local.detach().clone()


def parts_of(tensors: Iterable[tuple[str, Tensor | None]], splits: TensorSplits) -> dict[str, Box]:
    """This rank's parts of tensors that are there."""
    return {name: box(place_of(tensor, splits.get(name))) for name, tensor in tensors if tensor is not None}


def gradients_of(applied: ParallelModel) -> dict[str, Box]:
    """This rank's parts of all gradients."""
    return parts_of(((name, p.grad) for name, p in applied.parameters.items()), applied.splits)


def values_of(parameters: dict[str, nn.Parameter], splits: TensorSplits) -> dict[str, Box]:
    """This rank's parts of all parameters."""
    return parts_of(parameters.items(), splits)


def joined(ranks: list[dict[str, Box]]) -> dict[str, Tensor]:
    """Whole tensors of the parts of all ranks; NaN (255 of bytes) where no rank has any, and an error where two disagree."""
    whole: dict[str, Tensor] = {}
    for parts in ranks:
        for name, (offsets, shape, elements) in parts.items():
            absent = torch.nan if elements.is_floating_point() else 255
            target = whole.setdefault(name, torch.full(shape, absent, dtype=elements.dtype))
            for dim, (start, length) in enumerate(zip(offsets, elements.shape, strict=True)):
                target = target.narrow(dim, start, length)
            known = ~target.isnan() if elements.is_floating_point() else target != absent
            torch.testing.assert_close(elements[known], target[known], rtol=1e-9, atol=1e-12)
            target.copy_(elements)
    return whole
