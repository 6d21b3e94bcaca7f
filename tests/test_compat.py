import pytest
import torch

from phalanx import compat


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_summed_in_the_wider_format(narrow: torch.dtype) -> None:
    wide = torch.promote_types(narrow, torch.float32)
    generator = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(8, 5, generator=generator).to(narrow), torch.randn(5, 6, generator=generator).to(narrow))
        for _ in range(3)
    ]
    total = None
    for a, b in parts:
        total = compat.add_matmul(total, a, b, wide)
    assert total is not None
    assert total.dtype == wide
    expected = sum(a.double() @ b.double() for a, b in parts)
    tolerance = 1e-2 if narrow == torch.bfloat16 else 1e-5
    torch.testing.assert_close(total.double(), expected, rtol=tolerance, atol=tolerance)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert compat.full_name("blocks.0._orig_mod._checkpoint_wrapped_module.mlp.up.weight") == "blocks.0.mlp.up.weight"


def test_the_cpu_keeps_no_memory_count() -> None:
    assert compat.memory_statistics(torch.device("cpu")) == {}
