"""What dry runs change in PyTorch."""

from __future__ import annotations

import torch

from phalanx.torch_compat import common as compat
from phalanx.torch_compat.fake import fake_tensors_everywhere


def test_sums_of_products_in_a_wider_format_have_shapes_too() -> None:
    """PyTorch 2.11 takes the format for a factor there, and fails."""
    with fake_tensors_everywhere(), compat.cpu_stands_in():
        narrow = torch.ones(4, 3, dtype=torch.bfloat16)
        total = compat.add_matmul(None, narrow, narrow.T, torch.float32)
        assert (total.shape, total.dtype) == ((4, 4), torch.float32)
        assert compat.add_matmul(total, narrow, narrow.T, torch.float32) is total
