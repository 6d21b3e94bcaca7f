"""A Llama-style decoder trained by plain PyTorch and `transformers`, on the samples of one of our run files in their
order.

    python benchmarks/rivals/transformers_run.py RUN.yaml --weights FOLDER --out OUT.json

FOLDER is a Hugging Face folder with the weights to begin with; --rounding 1e-6 changes each by about that share, as
another order of sums would. The model is `transformers`' LlamaForCausalLM,
computed in bfloat16 by autocast (or in float32, as the run file says); loss, AdamW, clipping, schedule and loop are
PyTorch's, written out below. Of Phalanx come the batches and the held-out samples, so that both read the same. The
result holds the loss of every step and the held-out loss at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phalanx.config.load import load_run
from phalanx.families.language.config import LanguageRun, require_language
from phalanx.families.language.data.open_tokens import open_source, token_path
from phalanx.families.language.data.token_batches import TokenBatch
from phalanx.families.language.evaluation.held_out import score_split, spread_samples
from phalanx.families.registry import bind
from phalanx.layout.mesh import ONE_RANK
from phalanx.layout.resolve import resolve_layout
from phalanx.training.inputs import TrainableModel


def main() -> None:
    """Train and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("words", nargs="*", help="section.field=value for the run file")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--rounding", type=float, default=0.0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    run = require_language(load_run(asked.run, asked.words), "this script")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformers.LlamaForCausalLM.from_pretrained(
        asked.weights, dtype=torch.float32, attn_implementation="sdpa", use_cache=False
    ).to(device)
    perturb_weights(model, asked.rounding)
    start = time.perf_counter()
    loss = train(run, model, device)
    result = {
        "name": "transformers",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "parameters": model.num_parameters(),
        "loss": [round(value, 6) for value in loss],
        "seconds": time.perf_counter() - start,
        "held_out": {run.training.steps: held_out_loss(run, model, device)},
    }
    asked.out.write_text(json.dumps(result))
    print(f"transformers: {loss[-1]:.4f}")


@torch.no_grad()
def perturb_weights(model: nn.Module, share: float) -> None:
    """Multiply every weight by 1 plus a normal number with this standard deviation."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.mul_(1.0 + share * torch.randn(parameter.shape, device="cpu").to(parameter.device))


def train(run: LanguageRun, model: nn.Module, device: torch.device) -> list[float]:
    """Train as the run file says and return the loss of every step."""
    settings, losses = run.optimizer, []
    optimizer = build_optimizer(run, model)
    bound = bind(run, TrainableModel)
    inputs = bound.open_inputs(resolve_layout(bound, 1), ONE_RANK, device, first=True)
    inputs.stream.seek(0)
    with contextlib.closing(inputs.stream):
        for step in range(1, run.training.steps + 1):
            batch = inputs.stream.next().to(device)
            assert isinstance(batch, TokenBatch)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run, step)
            targets = batch.targets.numel()
            with autocast(run, device):
                loss = sum_loss(model, batch) / targets
            loss.backward()
            if settings.grad_clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return torch.stack(losses).tolist()


def autocast(run: LanguageRun, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a run in bfloat16 computes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=run.layout.precision == "bf16")


def sum_loss(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the summed loss of a batch, in nats."""
    logits_BSV = model(input_ids=batch.tokens).logits
    return cross_entropy(logits_BSV.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")


def build_optimizer(run: LanguageRun, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices, and neither norms nor the table of tokens."""
    settings, decayed, others = run.optimizer, [], []
    for name, parameter in model.named_parameters():
        (others if parameter.ndim < 2 or "embed_tokens" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def learning_rate(run: LanguageRun, step: int) -> float:
    """Return the rate of a step, from 1: linear warm-up, then half a cosine down to the least one."""
    settings, steps = run.optimizer, run.training.steps
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    least = settings.lr * settings.min_lr_ratio
    return least + (settings.lr - least) * (1.0 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def held_out_loss(run: LanguageRun, model: nn.Module, device: torch.device) -> float:
    """Return the loss of the held-out samples on which a run of ours is evaluated."""
    opened = [open_source(token_path(source.path), "validation") for source in run.data.sources]
    sources = [source for source in opened if source is not None]
    nats, count = 0.0, 0
    for source, numbers in zip(
        sources, spread_samples(sources, run.data.sequence_length, run.evaluation.samples), strict=True
    ):
        with autocast(run, device):
            found = score_split(
                lambda batch: sum_loss(model, batch),
                source,
                vocab_size=run.model.vocab_size,
                sequence_length=run.data.sequence_length,
                device=device,
                numbers=numbers,
            )
        nats, count = nats + found.nats, count + found.tokens
    return nats / count


if __name__ == "__main__":
    main()
