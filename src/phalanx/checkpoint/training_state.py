"""What makes up a training state: tensors under names that depend on the model alone, and random number generators.

    model.<name>                 parameters and persistent buffers
    ema.<name>                   moving averages of parameters, where the run keeps them
    optimizer.<name>.<what>      what the optimizer keeps for the parameter <name>: exp_avg, exp_avg_sq, step, ...

Names do not depend on parameter groups, their order, torch.compile or recompute. Hyper-parameters (learning rate,
betas, weight decay) are no part of the state: they come from the run file, so that a changed run file is obeyed.

What Phalanx itself draws (initial weights, data order, dropout) depends on seed, step and position alone. The states of the
global generators are kept for code that draws from them, such as a user's own model: as hexadecimal text and plain numbers.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor, nn

from phalanx.errors import CheckpointError
from phalanx.layout.place import Place, TensorSplit, TensorSplits, place_of
from phalanx.torch_compat.common import full_name


def collect_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return the tensors of `model` and `optimizer` themselves, not copies: loading into them changes model and optimizer.

    A tensor that the model has under several names (a tied head) comes once, under the first. Raises CheckpointError for
    state that is not a tensor, and for a parameter of the optimizer that is not the model's.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    for raw_name, value in model.state_dict(keep_vars=True).items():
        name = full_name(raw_name)
        if not isinstance(value, Tensor):
            raise CheckpointError(f"model state {name} is a {type(value).__name__}, not a tensor; make it a buffer")
        # By identity, not by value: only tied weights are one tensor under two names.
        if id(value) not in names:
            names[id(value)] = name
            tensors[f"model.{name}"] = value
    if optimizer is None:
        return tensors
    for group_index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            # Its state would be saved under no name, and be lost without a word.
            if id(parameter) not in names:
                raise CheckpointError(
                    f"a parameter of shape {list(parameter.shape)} in optimizer group {group_index} is not one of the "
                    f"model's; make the optimizer from model.parameters()"
                )
            for what, value in optimizer.state.get(parameter, {}).items():
                name = f"optimizer.{names[id(parameter)]}.{what}"
                if isinstance(value, Tensor):
                    tensors[name] = value
                elif value is not None:
                    raise CheckpointError(f"{name} is a {type(value).__name__}, not a tensor; it would not be restored")
    return tensors


@torch.no_grad()
def materialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer` allocate the state it otherwise allocates in its first step, all zero, as a place to load into.

    Parameters keep their values, gradients and hyper-parameters; state that exists is left alone.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    if not fresh:
        return
    # One step with zero gradients and a learning rate of zero, so that any optimizer builds its own state in its own way.
    # Put back below: a caller may be between two backward passes.
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in fresh:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for parameter in fresh:
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.zero_()


def placed_tensors(
    tensors: Mapping[str, Tensor], splits: TensorSplits, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Place]:
    """Return the tensors of a model in any layout, by names in the whole model, as `collect_tensors` does for one rank.

    Each comes as this rank's part and its place in the whole; so does optimizer state that is shaped like its parameter, or
    that has one value for each block of its columns.
    """
    placed = {f"model.{name}": place_of(tensor, splits.get(name)) for name, tensor in tensors.items()}
    for name, parameter in tensors.items():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for what, value in state.items():
            key = f"optimizer.{name}.{what}"
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{key} is a {type(value).__name__}, not a tensor; it would not be restored")
            placed[key] = place_of(value, _split_of_state(value, parameter, splits.get(name)))
    return placed


def _split_of_state(value: Tensor, parameter: Tensor, split: TensorSplit | None) -> TensorSplit | None:
    """Return which part of its whole `value` is, optimizer state of a part of a parameter that is cut by `split`."""
    # A step counter, or a factored moment, is no part of the parameter and has no place in it.
    if split is None or value.dim() != parameter.dim() or value.shape[:-1] != parameter.shape[:-1]:
        return None
    if value.shape == parameter.shape:
        return split
    # One value for each block of columns, such as a scale; a split of columns cuts between blocks.
    across = _split_of_state(value, parameter, split.across)
    if split.dim != parameter.dim() - 1:
        return replace(split, across=across)
    columns = parameter.shape[-1] // value.shape[-1]
    return TensorSplit(split.dim, split.start // columns, -(-split.whole // columns), across)


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
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        # This rank's own device: each rank has a generator, and rank 0's state is what is saved.
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
        device = torch.accelerator.current_accelerator(check_available=True)
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
