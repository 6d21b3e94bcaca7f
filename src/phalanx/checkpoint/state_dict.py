"""Tensors that another framework trained: a state dict in a safetensors file, of which no tensor is lost in silence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from phalanx.errors import CheckpointError


class StateDict:
    """The tensors of a state dict, in float64, and which of them have been read."""

    def __init__(
        self, where: Path, takes: str, derived: Sequence[str] = (), rename: Callable[[str], str] = lambda name: name
    ) -> None:
        """Load the file `where`.

        takes: sentence that ends messages: which models are read. derived: patterns of tensors that follow from others and
        need not be read. rename: maps a name in the file to the one that it is asked for by. Raises CheckpointError for a
        file that is no safetensors file, and for two tensors of one name.
        """
        self.where = where
        self._takes = takes
        self._derived = derived
        try:
            found = load_file(where)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{where} is no safetensors file ({error}); write the state dict of the model with "
                "safetensors.torch.save_file, see docs/guides/convert.md"
            ) from None
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in found.items():
            if rename(name) in self._tensors:
                self.refuse(f"{name} is there twice, as {rename(name)} too")
            self._tensors[rename(name)] = tensor
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def count(self, pattern: str) -> int:
        """Return how many tensors of names like "layers.{}.weight" there are, numbered from 0 on."""
        number = 0
        while pattern.format(number) in self._tensors:
            number += 1
        return number

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises CheckpointError where there is none of that name."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.where} has no {name}; it is needed, see docs/guides/convert.md")
        self._read.add(name)
        return self._tensors[name].double()

    def number(self, name: str) -> float:
        """Return a tensor of one number."""
        return float(self.read(name))

    def matrix(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in another shape. Raises CheckpointError where it has not as many numbers."""
        found = self.read(name)
        if found.numel() != math.prod(shape):
            self.refuse(f"{name} has {found.numel():,} numbers, {' x '.join(map(str, shape))} are read")
        return found.reshape(shape)

    def shaped(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape. Raises CheckpointError where it has another one."""
        found = self.read(name)
        if found.shape != shape:
            self.refuse(f"{name} has the shape {list(found.shape)}, {list(shape)} is read")
        return found

    def refuse(self, what: str) -> None:
        """Raise CheckpointError: the model computes something else."""
        raise CheckpointError(f"{self.where}: {what}; {self._takes}")

    def refuse_unread(self) -> None:
        """Raise CheckpointError where a tensor that changes what the model computes was not read."""
        for name, tensor in self._tensors.items():
            derived = tensor.numel() == 0 or any(fnmatchcase(name, pattern) for pattern in self._derived)
            if name not in self._read and not derived:
                self.refuse(f"{name} stands for something that our model does not compute")
