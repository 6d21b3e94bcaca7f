"""The states of the random number generators a program may use, as JSON values: hexadecimal text and plain numbers.

What Phalanx itself draws (initial weights, data order, dropout) depends on seed, step and position alone and needs none
of these; they are kept for code that draws from the global generators, such as a user's own model.
"""

from __future__ import annotations

import random
import struct
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from phalanx.errors import CheckpointError

_TWISTER_WORDS = 624
_WORDS = struct.Struct("<625I")
"""State of a Mersenne Twister: 624 words of 32 bits and the position among them."""


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy, PyTorch on the CPU and on this rank's accelerator."""
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
    """Set the generators to a state that `rng_state` returned.

    The state of an accelerator is left out on a machine whose accelerator is of another type or that has none. Raises
    CheckpointError for anything that `rng_state` cannot have returned.
    """
    try:
        saved = RngState.model_validate(state)
        random.setstate((saved.python.version, _WORDS.unpack(bytes.fromhex(saved.python.words)), saved.python.gauss))
        *key, position = _WORDS.unpack(bytes.fromhex(saved.numpy.words))
        gauss = saved.numpy.gauss
        words = np.array(key, dtype=np.uint32)
        np.random.set_state(("MT19937", words, position, int(gauss is not None), 0.0 if gauss is None else gauss))
        torch.set_rng_state(_from_hex(saved.torch))
        device = torch.accelerator.current_accelerator()
        if saved.accelerator and device is not None and device.type == saved.accelerator.device:
            torch.get_device_module(device).set_rng_state(_from_hex(saved.accelerator.state))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"state.rng is not a state of random number generators: {error}") from error


def _check_words(text: str) -> str:
    *_, position = _WORDS.unpack(bytes.fromhex(text))
    if position > _TWISTER_WORDS:
        raise ValueError(f"position {position} among {_TWISTER_WORDS} words")
    return text


def _check_torch(text: str) -> str:
    # PyTorch alone knows which bytes are a state: a generator that nobody uses tries them.
    try:
        torch.Generator().set_state(_from_hex(text))
    except (RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from error
    return text


_Words = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * _WORDS.size}}}$"), AfterValidator(_check_words)]
_Gauss = Annotated[float, Field(allow_inf_nan=False)] | None


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class PythonState(_Record):
    """State of Python's global generator."""

    version: Literal[3]
    words: _Words
    gauss: _Gauss


class NumpyState(_Record):
    """State of NumPy's global generator."""

    words: _Words
    gauss: _Gauss


class AcceleratorState(_Record):
    """State of the generator of an accelerator."""

    device: str
    state: Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]


class RngState(_Record):
    """What `rng_state` returns."""

    python: PythonState
    numpy: NumpyState
    torch: Annotated[str, Field(pattern="^([0-9a-f]{2})+$"), AfterValidator(_check_torch)]
    accelerator: AcceleratorState | None


def _to_hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
