"""Reference graph models on the structures, splits, batch and weights of one of our run files, with PyG's own loader.

    python benchmarks/rivals/graph_run.py RUN.yaml --model schnet --steps 60 --skip 10 --json speed.json
    torchrun --nproc-per-node 4 benchmarks/rivals/graph_run.py RUN.yaml --model hydragnn --hydragnn CHECKOUT --steps 60 ...
    python benchmarks/rivals/graph_run.py RUN.yaml --model schnet --minutes 5 --folder OUT --json errors.json

With --steps it measures speed: atoms/s and edges/s over all ranks, data loading included. With --minutes it trains for so
long (time in steps counts, evaluation does not) and gives errors on our test split; run again, it goes on where it stopped.
Data parallelism is PyTorch's DistributedDataParallel, batches are `global_batch / ranks` structures of each rank.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_geometric
from graph_models import HydraGnn, PygSchNet, Reference
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from phalanx.config.load import load_run
from phalanx.families.materials.config import MaterialsRun
from phalanx.families.materials.data.graph_batches import Collator
from phalanx.families.materials.data.graph_shards import Located, open_prepared
from phalanx.families.materials.inputs import columns_of
from phalanx.hardware.device import choose_device, device_name

_WARM_UP = 0.02
"""Share of the training time in which the learning rate rises."""
_LAST_RATE = 0.01
_SAVE_EVERY = 60.0
"""Seconds of training."""


def structures(run: MaterialsRun, split: Any) -> list[Data]:
    """Every structure of a split: positions in A, energies in eV less the run file's reference energies."""
    sources = open_prepared(run.data, split)
    collate, found = Collator(sources, columns_of(run, sources)), []
    for number, source in enumerate(sources):
        item = np.arange(len(source), dtype=np.int64)
        atoms, edges = source.sizes(item)
        batch = collate(Located(item, np.full_like(item, number), item, atoms, edges), (1,) * len(item))
        branch = run.model.branches[number] if len(run.model.branches) > 1 else run.model.branches[0]
        reference = torch.zeros(run.model.max_atomic_number + 1, dtype=torch.float64)
        for element, energy in branch.reference_energies.items():
            reference[int(element)] = energy
        found += [_structure(one, reference) for one in batch.split(len(item))] if len(item) else []
    return found


def _structure(one: Any, reference: torch.Tensor) -> Data:
    data = Data(
        z=one.species_N.clone(),
        pos=one.positions_N3.clone(),
        edge_index=one.edges_2E.clone(),
        edge_shifts=one.shifts_E3.clone(),
        atoms=torch.tensor([float(len(one.species_N))]),
        dataset_name=torch.zeros(1, 1, dtype=torch.int64),
    )
    if one.energy_G is not None:
        data.energy = (one.energy_G - reference[one.species_N].sum()).float()
        data.forces = one.forces_N3.clone()
    if one.charges_N is not None:
        data.charges = one.charges_N.clone()
    if one.properties_GP is not None:
        data.properties = one.properties_GP.float()
    return data


class Loop:
    """Steps of one model on one rank."""

    def __init__(self, run: MaterialsRun, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(run.training.seed)
        self.run, self.device = run, device
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        reference = (
            PygSchNet(run.model) if arguments.model == "schnet" else HydraGnn(run.model, arguments.hydragnn, device)
        )
        self.model: Reference = reference.to(device)
        self.wrapped: Any = self.model
        if self.ranks > 1:
            self.wrapped = DistributedDataParallel(
                self.model, device_ids=None if device.type == "cpu" else [device.index]
            )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=run.optimizer.lr,
            betas=tuple(run.optimizer.betas),
            weight_decay=run.optimizer.weight_decay,
            fused=device.type != "cpu",
        )
        self.workers = arguments.workers
        self.data = structures(run, "train")
        self.epoch = 0

    def batches(self) -> Iterator[Any]:
        """Epoch after epoch."""
        sampler: Any = DistributedSampler(self.data) if self.ranks > 1 else None
        loader = DataLoader(
            self.data,
            batch_size=self.run.layout.global_batch // self.ranks,
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=self.device.type != "cpu",
            drop_last=True,
        )
        while True:
            if sampler is not None:
                sampler.set_epoch(self.epoch)
            yield from loader
            self.epoch += 1

    def step(self, batch: Any) -> tuple[int, int]:
        """One step, done when this returns; atoms and edges of this rank."""
        batch = batch.to(self.device, non_blocking=True)
        loss = self.wrapped(batch)
        loss.backward()
        if self.run.optimizer.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        return batch.num_nodes, batch.num_edges


def speed(loop: Loop, steps: int, skip: int) -> dict[str, Any]:
    """Seconds of each step, and what they come to."""
    batches, seconds, sizes = loop.batches(), [], []
    for _ in range(steps):
        start = time.perf_counter()
        sizes.append(loop.step(next(batches)))
        seconds.append(time.perf_counter() - start)
    done = torch.tensor(sizes[skip:], dtype=torch.float64, device=loop.device).sum(0)
    if loop.ranks > 1:
        dist.all_reduce(done)
    atoms, edges = (done / sum(seconds[skip:])).tolist()
    return {"atoms_per_second": atoms, "edges_per_second": edges, "step_seconds": seconds}


def train(loop: Loop, minutes: float, folder: Path) -> dict[str, Any]:
    """Train until `minutes` have gone into steps, then measure errors on the test split."""
    folder.mkdir(parents=True, exist_ok=True)
    path, limit = folder / "state.safetensors", 60.0 * minutes
    spent, steps = _restore(loop, path)
    saved, batches = spent, loop.batches()
    while spent < limit:
        start = time.perf_counter()
        share = spent / limit
        rate = min(share / _WARM_UP + 1e-3, _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)
        for group in loop.optimizer.param_groups:
            group["lr"] = rate * loop.run.optimizer.lr
        loop.step(next(batches))
        spent, steps = spent + time.perf_counter() - start, steps + 1
        if spent - saved > _SAVE_EVERY or spent >= limit:
            _save(loop, path, spent, steps)
            saved = spent
    return {"training_seconds": spent, "steps": steps, "errors": errors(loop)}


@torch.no_grad()
def errors(loop: Loop) -> list[dict[str, Any]]:
    """MAE and RMSE of every quantity over the test split."""
    sums: dict[tuple[str, str], Any] = defaultdict(lambda: np.zeros(3))
    loop.model.eval()
    for batch in DataLoader(structures(loop.run, "test"), batch_size=loop.run.layout.global_batch):
        for name, unit, predicted, wanted in loop.model.predict(batch.to(loop.device)):
            off = (predicted - wanted).double()
            sums[name, unit] += [float(off.abs().sum()), float(off.square().sum()), off.numel()]
    loop.model.train()
    return [
        {
            "quantity": name,
            "unit": unit,
            "mae": total / count,
            "rmse": math.sqrt(squares / count),
            "numbers": int(count),
        }
        for (name, unit), (total, squares, count) in sums.items()
    ]


def _save(loop: Loop, path: Path, spent: float, steps: int) -> None:
    tensors = {f"model.{name}": value for name, value in loop.model.state_dict().items()}
    for index, state in loop.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    held = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    held["spent"] = torch.tensor([spent, float(steps), float(loop.epoch)], dtype=torch.float64)
    beside = path.with_suffix(".new")
    save_file(held, beside)
    beside.replace(path)


def _restore(loop: Loop, path: Path) -> tuple[float, int]:
    if not path.exists():
        return 0.0, 0
    held = load_file(path, device=str(loop.device))
    spent, steps, epoch = held.pop("spent").tolist()
    loop.model.load_state_dict({name[6:]: value for name, value in held.items() if name.startswith("model.")})
    state: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, value in held.items():
        if name.startswith("optimizer."):
            _, index, what = name.split(".")
            state[int(index)][what] = value
    loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": dict(state)})
    loop.epoch = int(epoch) + 1
    return spent, int(steps)


def main() -> None:
    """Measure or train, and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, help="run file of ours, its data prepared")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    parser.add_argument("--model", choices=("schnet", "hydragnn"), required=True)
    parser.add_argument("--hydragnn", type=Path, help="checkout of ORNL/HydraGNN")
    parser.add_argument("--steps", type=int, help="measure the speed of so many steps")
    parser.add_argument("--skip", type=int, default=5, help="steps of these that are not counted")
    parser.add_argument("--minutes", type=float, help="train for so long")
    parser.add_argument("--folder", type=Path, help="where training keeps its state")
    parser.add_argument(
        "--workers", type=int, default=4, help="processes of PyG's loader; 0 loads in the training loop"
    )
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_intermixed_args()
    device = choose_device("auto", int(os.environ.get("LOCAL_RANK", "0")))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device))
    run = load_run(arguments.run, arguments.overrides)
    assert isinstance(run, MaterialsRun)
    loop = Loop(run, arguments, device)
    if arguments.steps is not None:
        result = speed(loop, arguments.steps, arguments.skip)
    else:
        result = train(loop, arguments.minutes, arguments.folder)
    about = {
        "model": arguments.model,
        "parameters": sum(parameter.numel() for parameter in loop.model.parameters()),
        "ranks": loop.ranks,
        "global_batch": run.layout.global_batch,
        "workers": arguments.workers,
        "device": platform.processor() if device.type == "cpu" else device_name(device),
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }
    if loop.ranks == 1 or dist.get_rank() == 0:
        arguments.json.write_text(json.dumps({**about, **result}, indent=1) + "\n")
        print(json.dumps({name: value for name, value in {**about, **result}.items() if name != "step_seconds"}))
    if loop.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
