"""The states of the random number generators a program may use, as JSON values: hexadecimal text and plain numbers.

What Phalanx itself draws (initial weights, data order, dropout) depends on seed, step and position alone and needs none
of these; they are kept for code that draws from the global generators, such as a user's own model.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import torch

from phalanx.errors import CheckpointError

_WORDS = struct.Struct("<625I")
"""State of a Mersenne Twister: 624 words and the position among them."""


def rng_state() -> dict[str, Any]:
    """The state of the global generators of Python, NumPy, PyTorch on the CPU and on this rank's accelerator."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    twister = legacy["state"]
    state: dict[str, Any] = {
        "python": {"version": version, "words": _WORDS.pack(*words).hex(), "gauss": gauss},
        "numpy": {
            "words": _WORDS.pack(*twister["key"].tolist(), int(twister["pos"])).hex(),
            "gauss": float(legacy["gauss"]) if legacy["has_gauss"] else None,
        },
        "torch": _to_hex(torch.get_rng_state()),
        "accelerator": None,
    }
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        module = torch.get_device_module(device)
        state["accelerator"] = {"device": device.type, "state": _to_hex(module.get_rng_state())}
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back where `rng_state` found them.

    The state of an accelerator is left out on a machine whose accelerator is of another type or that has none. Raises
    CheckpointError for anything that `rng_state` cannot have returned.
    """
    try:
        python, numpy, accelerator = state["python"], state["numpy"], state["accelerator"]
        random.setstate((python["version"], _WORDS.unpack(bytes.fromhex(python["words"])), python["gauss"]))
        *key, position = _WORDS.unpack(bytes.fromhex(numpy["words"]))
        gauss = numpy["gauss"]
        words = np.array(key, dtype=np.uint32)
        np.random.set_state(("MT19937", words, position, int(gauss is not None), 0.0 if gauss is None else gauss))
        torch.set_rng_state(_from_hex(state["torch"]))
        device = torch.accelerator.current_accelerator()
        if accelerator and device is not None and device.type == accelerator["device"]:
            torch.get_device_module(device).set_rng_state(_from_hex(accelerator["state"]))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"state.rng is not a state of random number generators: {error!r}") from error


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
