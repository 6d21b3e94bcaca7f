"""From the variables of a location to its tokens: attention of learned queries, without forming a token a variable.

ClimaX makes a token of each variable at each location, P x + c with the patch embedding P of that variable, and attends to
these with queries that are parameters. Since the queries do not depend on the fields, scores and values are linear in the
patch x before and after the softmax: q.W_k(P x + c) = (P^T W_k^T q).x + const, and the same for W_v. Multiplying the
weights first gives the same function without the V tokens of width D at each location, which are most of the memory and
the work of the published form: with P points a patch it holds V*(P+1) numbers a head and location in place of V*D for all
heads together, and as many for keys and for values; and it needs D/(P+1) times fewer operations for these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.families.weather.model_config import WeatherModel
from phalanx.families.weather.sizes import group_sizes
from phalanx.nn.layers import Linear


class _Aggregation(nn.Module):
    """Attention of learned queries. The key has no bias: it would add the same to all scores of a query.

    Rows of `query`, `key` and `value`, and columns of `output`, are grouped by head: a contiguous part of each is a whole
    number of heads, and a module that holds such parts computes these heads alone.
    """

    def __init__(self, config: WeatherModel, n_queries: int) -> None:
        super().__init__()
        width = config.d_model
        self.head_size = config.head_size
        self.queries = nn.Parameter(torch.empty(n_queries, width))
        self.query = Linear(width, width, bias=True)
        self.key = Linear(width, width, bias=False)
        self.value = Linear(width, width, bias=True)
        self.output = Linear(width, width, bias=True)

    def directions(self, queries_ND: Tensor) -> Tensor:
        """Directions in token space whose product with a token is its score under each query and head, [N, A, D]."""
        query_NAE = self._heads(self.query(queries_ND) * self.head_size**-0.5)
        key_AED = self.key.weight.to(queries_ND.dtype).unflatten(0, (-1, self.head_size))
        return torch.einsum("nae,aed->nad", query_NAE, key_AED)

    def _heads(self, x: Tensor) -> Tensor:
        by_head: Tensor = x.unflatten(-1, (-1, self.head_size))
        return by_head

    def finish(self, mixed_BLNAE: Tensor) -> Tensor:
        """Values under each head -> tokens [B, L*N, D]: bias of the values, output projection."""
        assert self.value.bias is not None
        mixed = mixed_BLNAE.flatten(-2) + self.value.bias.to(mixed_BLNAE.dtype)
        tokens: Tensor = self.output(mixed.flatten(1, 2))
        return tokens


class PatchAggregation(_Aggregation):
    """Attention to variables as they come out of the patches."""

    def forward(self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor) -> Tensor:
        """Tokens [B, L*N, D] of all queries; see `attend`."""
        return self.attend(patches_BLVP, weight_VDP, offset_VD, slice(None))

    def attend(self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor, queries: slice) -> Tensor:
        """Tokens [B, L*N, D] of `queries`, over the variables given; N is the number of queries.

        A variable's token would be weight_DP x_P + offset_D. All in the format of the activations.
        """
        direction_NAD = self.directions(self.queries[queries].to(patches_BLVP.dtype))
        # The offset as one more point of each patch, whose value is 1.
        weight_VDQ = torch.cat((weight_VDP, offset_VD[..., None]), dim=-1)
        patches_BLVQ = torch.cat((patches_BLVP, torch.ones_like(patches_BLVP[..., :1])), dim=-1)
        per_point_NAVQ = torch.einsum("nad,vdq->navq", direction_NAD, weight_VDQ)
        scores_ABLNV = torch.einsum("blvq,navq->ablnv", patches_BLVQ, per_point_NAVQ)
        share_ABLNV = scores_ABLNV.softmax(dim=-1)
        value_AED = self.value.weight.to(weight_VDQ.dtype).unflatten(0, (-1, self.head_size))
        value_AVQE = torch.einsum("aed,vdq->avqe", value_AED, weight_VDQ)
        shares = share_ABLNV[..., None] * patches_BLVQ[:, :, None]
        mixed_AME = shares.flatten(1, 3).flatten(2) @ value_AVQE.flatten(1, 2)
        mixed_ABLNE = mixed_AME.unflatten(1, share_ABLNV.shape[1:4])
        return self.finish(mixed_ABLNE.permute(1, 2, 3, 0, 4))


class TokenAggregation(_Aggregation):
    """Attention to tokens of a location, few of them."""

    def forward(self, tokens_BLGD: Tensor) -> Tensor:
        """[B, L, G, D] -> tokens [B, L*N, D] of all queries."""
        direction_NAD = self.directions(self.queries.to(tokens_BLGD.dtype))
        share_BLNAG = torch.einsum("blgd,nad->blnag", tokens_BLGD, direction_NAD).softmax(dim=-1)
        value_BLGAE = self._heads(self.value.product(tokens_BLGD, None))
        return self.finish(torch.einsum("blnag,blgae->blnae", share_BLNAG, value_BLGAE))


class HierarchicalAggregation(nn.Module):
    """Groups of consecutive variables become one token each, and those the location's tokens (D-CHAG, arXiv:2506.21411).

    Groups have a query each and share the projections. `partial` computes some of the groups, so that they can be shared
    out; `combine` needs the tokens of all.
    """

    def __init__(self, config: WeatherModel) -> None:
        super().__init__()
        self.sizes = group_sizes(len(config.input_names), config.aggregation_groups)
        self.groups = PatchAggregation(config, config.aggregation_groups)
        self.final = TokenAggregation(config, config.aggregation_queries)

    def forward(self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor) -> Tensor:
        """Tokens [B, L*K, D], as of `PatchAggregation`."""
        return self.combine(self.partial(patches_BLVP, weight_VDP, offset_VD, range(len(self.sizes))))

    def partial(self, patches_BLVP: Tensor, weight_VDP: Tensor, offset_VD: Tensor, groups: range) -> Tensor:
        """Tokens [B, L, len(groups), D] of consecutive groups; patches, weights and offsets are of their variables alone."""
        sizes = [self.sizes[group] for group in groups]
        parts = zip(patches_BLVP.split(sizes, 2), weight_VDP.split(sizes), offset_VD.split(sizes), groups, strict=True)
        return torch.stack([self.groups.attend(x, w, c, slice(g, g + 1)) for x, w, c, g in parts], dim=2)

    def combine(self, tokens_BLGD: Tensor) -> Tensor:
        """[B, L, G, D] of all groups -> tokens [B, L*K, D]."""
        tokens: Tensor = self.final(tokens_BLGD)
        return tokens


def build_aggregation(config: WeatherModel) -> PatchAggregation | HierarchicalAggregation:
    """The aggregation `config.aggregation` asks for."""
    if config.aggregation == "hierarchical":
        return HierarchicalAggregation(config)
    return PatchAggregation(config, config.aggregation_queries)
