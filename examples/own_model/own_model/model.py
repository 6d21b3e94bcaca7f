"""Blocks that gate a causal convolution: y = x + down(conv(up(x)) * silu(gate(x)))."""

import torch.nn.functional as F
from torch import Tensor, nn

from own_model.family import GatedConvModel, GatedConvRun
from phalanx import BlockNetwork, BoundBlocks, TensorSpec
from phalanx.nn.layers import Linear, Norm
from phalanx.nn.splits import Split, Splits


class Embedding(Linear):
    def forward(self, x_BS1: Tensor, positions_S: Tensor) -> Tensor:
        return x_BS1 * self.weight[:, 0]


class Head(Linear):
    def forward(self, x_BSD: Tensor) -> Tensor:
        return (x_BSD * self.weight[0].to(x_BSD.dtype)).sum(-1, keepdim=True)


class CausalConv(Linear):
    """Convolves each channel by itself, so that a rank which holds some channels needs nothing of the others."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        channels, size = self.weight.shape
        padded = F.pad(x_BSF.transpose(1, 2), (size - 1, 0))
        return F.conv1d(padded, self.weight.to(x_BSF.dtype)[:, None], groups=channels).transpose(1, 2)


class GatedConv(nn.Module):
    def __init__(self, config: GatedConvModel) -> None:
        super().__init__()
        self.norm = Norm(config.d_model, kind="rmsnorm", eps=1e-5, bias=False)
        self.up = Linear(config.d_model, config.hidden, bias=False)
        self.gate = Linear(config.d_model, config.hidden, bias=False)
        self.conv = CausalConv(config.kernel, config.hidden, bias=False)
        self.down = Linear(config.hidden, config.d_model, bias=True)

    def forward(self, x_BSD: Tensor) -> Tensor:
        normed = self.norm(x_BSD)
        return x_BSD + self.down(self.conv(self.up(normed)) * F.silu(self.gate(normed)))


class GatedConvNetwork(BlockNetwork):
    make_embedding = classmethod(lambda cls, config: Embedding(1, config.d_model, bias=False))
    make_block = classmethod(lambda cls, config, number: GatedConv(config))
    make_head = classmethod(lambda cls, config: Head(config.d_model, 1, bias=False))
    specs = classmethod(lambda cls, config: (TensorSpec((1,)), TensorSpec((1,))))

    @classmethod
    def splits(cls, config: GatedConvModel) -> Splits:
        # Channels go to ranks of tp: `up` and `gate` give them, `conv` keeps to them, `down` adds them up.
        kinds = {"up": "column", "gate": "column", "conv": "part", "down": "row"}
        return [(f"blocks.*.{name}", Split(kind)) for name, kind in kinds.items()]


class BoundGatedConv(BoundBlocks):
    run: GatedConvRun
    network = GatedConvNetwork
