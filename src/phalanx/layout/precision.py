"""Number formats by the names that run files give them."""

from __future__ import annotations

import torch

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Format of activations and matmuls for each `layout.precision`."""
