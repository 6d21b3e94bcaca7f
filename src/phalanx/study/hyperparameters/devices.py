"""`python -m phalanx.study.hyperparameters.devices TYPE`: the devices that PyTorch sees here and their memory, as
one JSON object."""

from __future__ import annotations

import json
import sys

import torch

from phalanx.hardware.device import choose_device


def main(requested: str) -> None:
    """Print the type of the devices and the bytes of each."""
    kind = choose_device(requested).type
    memory = []
    if kind != "cpu":
        module = torch.get_device_module(kind)
        memory = [module.get_device_properties(index).total_memory for index in range(torch.accelerator.device_count())]
    json.dump({"kind": kind, "memory": memory}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
