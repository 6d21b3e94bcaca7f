"""Triton kernels compiled for devices that are not here, and run in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `make .venv/dev` adds it"
)
ASSEMBLY = {"gfx90a": "amdgcn", "gfx942": "amdgcn", "sm_90": "ptx"}
"""Targets, and what assembly of theirs is called."""
WIDE = {
    "amdgcn": (r"(?:global|buffer)_load_dwordx4\b", r"(?:global|buffer)_store_dwordx4\b"),
    "ptx": (r"ld\.global\S*\.v4\.b32\b", r"st\.global\S*\.v4\.b32\b"),
}
"""Loads and stores of 16 bytes."""
NARROW = {
    "amdgcn": r"(?:global|buffer|flat|scratch)_(?:load|store)_(?!dwordx4)\w+",
    "ptx": r"(?:ld|st)\.(?:global|local)(?!\S*\.v4)\S*",
}
"""All others."""


def threads(target: str, warps: int) -> int:
    """Of a program."""
    return warps * (32 if target == "sm_90" else 64)


def assembly_of(
    kernel: Any,
    target: str,
    warps: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    even: tuple[int, ...],
    *,
    layouts: bool = False,
) -> str:
    """Of `kernel` for one of ASSEMBLY; with `layouts` what it is made from, which says which threads hold what.

    types: of its arguments but the constants, as Triton calls them. even: which arguments are multiples of 16.
    """
    triton = pytest.importorskip("triton")
    GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
        attrs={(position,): [["tt.divisibility", 16]] for position in even},
    )
    device = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, 64)
    compiled = triton.compile(source, target=device, options={"num_warps": warps})
    return str(compiled.asm["ttgir" if layouts else ASSEMBLY[target]])


BOUNDS_OF_LOOPS = """
import triton.runtime.interpreter as _interpreter

_patch = _interpreter._patch_lang_tensor

def _patch_with_bounds(tensor, scope):
    # Triton 3.6 asks NumPy for the whole number in an array of one element, which NumPy 2.4 refuses.
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

_interpreter._patch_lang_tensor = _patch_with_bounds
"""


def run_interpreted(code: str) -> None:
    """Run `code` in a process that chooses the interpreter, as it must before it first sees a kernel."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", BOUNDS_OF_LOOPS + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
