"""Expert parallelism: rows of tokens travel to the ranks that hold their experts, and the results travel back.

One all-to-all each way (GShard, arXiv:2006.16668, section 3), of just the rows that were chosen: first the ranks tell each
other how many, then the rows follow, sorted by expert within each sender. Knows nothing of routing or of gradients' sums.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.kernels.routed_rows import SortRows
from phalanx.layout.mesh import Axis
from phalanx.layout.place import TensorSplit, TensorSplits
from phalanx.nn.experts import ExpertNetworks, MixtureOfExperts
from phalanx.torch_compat import common as compat


def split_experts(model: nn.Module, ep: Axis, exchange: TokenExchange | None = None) -> TensorSplits:
    """Keep this rank's experts of every mixture in `model`, still on meta, and let their rows be exchanged over `ep`.

    Returns which part of which parameter this rank keeps. `ep.size` divides the number of experts. exchange: how rows
    travel; None lets them travel as the routers say.
    """
    kept: TensorSplits = {}
    if ep.size == 1:
        return kept
    for name, module in model.named_modules():
        if not isinstance(module, MixtureOfExperts):
            continue
        module.compute_rows = exchange or TokenExchange(ep)
        for parameter_name, parameter in list(module.experts.named_parameters()):
            # Experts follow each other in the rows of a parameter: whole experts are whole parts of the rows.
            whole = parameter.shape[0]
            assert whole % ep.size == 0 and parameter.device.type == "meta"
            each = whole // ep.size
            part = nn.Parameter(parameter.detach().narrow(0, ep.rank * each, each).contiguous())
            setattr(module.experts, parameter_name, part)
            kept[f"{name}.experts.{parameter_name}"] = TensorSplit(0, ep.rank * each, whole)
    return kept


class TokenExchange:
    """Computes rows with the experts of all ranks of `ep`; stands in for `nn.experts.compute_here`."""

    def __init__(self, ep: Axis) -> None:
        self.ep = ep

    # What arrives has a size that only the routers know: a compiled program ends before it and begins anew behind it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, networks: ExpertNetworks, rows_RD: Tensor, ends_E: Tensor, complete: bool) -> Tensor:
        """Return each row's expert applied to it, [R, D]; 0 for rows behind the last expert's.

        rows: sorted by expert, over all experts. ends: int32 [E], one past each expert's last row. complete: whether every
        row has an expert; all ranks say the same.
        """
        size = self.ep.size
        starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
        sent_PE = (ends_E - starts_E).view(size, -1)
        arriving_PE = compat.all_to_all(sent_PE.long(), self.ep.group_name, size)
        # The one wait for the device: memory for what arrives cannot be had without its size.
        send, receive = self.read_sizes(sent_PE, arriving_PE, rows_RD.shape[0])
        chosen_RD = rows_RD if complete else rows_RD[: sum(send)]
        arrived_RD = ExchangeRows.apply(chosen_RD, send, receive, self.ep.group_name)
        by_expert, ends_local = order_by_expert(arriving_PE, sum(receive))
        source_R = by_expert.argsort()
        out_RD = networks(SortRows.apply(arrived_RD, source_R, by_expert[:, None].int()), ends_local, complete=True)
        as_arrived_RD = SortRows.apply(out_RD, by_expert, source_R[:, None].int())
        back_RD: Tensor = ExchangeRows.apply(as_arrived_RD, receive, send, self.ep.group_name)
        if complete:
            return back_RD
        left = rows_RD.shape[0] - back_RD.shape[0]
        return torch.cat((back_RD, back_RD.new_zeros((left, back_RD.shape[1]))))

    def read_sizes(self, sent_PE: Tensor, arriving_PE: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Return how many rows go to each rank and come from it; `BalancedExchange` stands in where counts have no values.

        sent, arriving: rows by rank and expert. rows: there are here, those without an expert among them.
        """
        sizes = torch.stack((sent_PE.long().sum(1), arriving_PE.sum(1))).tolist()
        return list(map(int, sizes[0])), list(map(int, sizes[1]))


class BalancedExchange(TokenExchange):
    """The exchange as cost models and dry runs see it: no router has chosen, every rank gets an equal part."""

    def __init__(self, ep: Axis, load: Fraction = Fraction(1)) -> None:
        """Exchange over `ep`. load: rows that arrive here, over those that leave."""
        super().__init__(ep)
        self.load = load

    def read_sizes(self, sent_PE: Tensor, arriving_PE: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Return equal parts of all rows, and `load` times as many that arrive."""
        return even_parts(rows, self.ep.size), even_parts(int(rows * self.load), self.ep.size)


def even_parts(total: int, parts: int) -> list[int]:
    """Return whole numbers that sum to `total` and differ by at most one."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def order_by_expert(arriving_PE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return where each row that arrived stands when all are sorted by expert, int64 [R], and each expert's end, int32 [E].

    arriving: how many rows each rank sends to each expert here; they arrive rank after rank, sorted by expert in each.
    rows: their sum.
    """
    before_arrival = arriving_PE.flatten().cumsum(0)
    counts_EP = arriving_PE.t().contiguous()
    before_sorted_PE = (counts_EP.flatten().cumsum(0).view_as(counts_EP) - counts_EP).t()
    row_R = torch.arange(rows, device=arriving_PE.device)
    block_R = torch.searchsorted(before_arrival, row_R, right=True)
    start_of_block = before_arrival - arriving_PE.flatten()
    by_expert = row_R - start_of_block[block_R] + before_sorted_PE.flatten()[block_R]
    return by_expert, counts_EP.sum(1).cumsum(0).int()


class ExchangeRows(torch.autograd.Function):
    """All-to-all of rows of uneven numbers; `apply(rows_RD, send, receive, group)`, numbers of rows by rank."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
        """Return what the ranks sent here, rank after rank."""
        ctx.sizes, ctx.group = (send, receive), group
        return compat.all_to_all_rows(rows_RD, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients the way back."""
        send, receive = ctx.sizes
        return compat.all_to_all_rows(grad_RD, receive, send, ctx.group), None, None, None
