"""A training loop of your own around `parallelize`: the model, the loop and the optimizer are plain PyTorch.

torchrun --nproc-per-node 4 examples/own_loop.py --tp 2      # tp=2 x dp_shard=2; one rank without torchrun
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx import Layout, parallelize

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 256, 64, 4, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.ModuleDict(
            {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 256), "down": nn.Linear(256, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        # As many heads as this rank's features make.
        query, key, value = (
            f(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.mlp["down"](functional.gelu(self.mlp["up"](self.mlp["norm"](x))))


def main(tp: int, precision: str, steps: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)]
    model = nn.Sequential(*layers)
    splits = {"0": "vocabulary", "*.query": "column", "*.key": "column", "*.value": "column", "*.output": "row"}
    splits |= {"*.up": "column", "*.down": "row", "3": "vocabulary"}
    layout = Layout(global_batch=BATCH, tp=tp, precision=precision, recompute="full")
    parallel = parallelize(model, splits, blocks=layers[1:3], layout=layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        # Every rank draws the same global batch and takes its share, so the layout changes no sample.
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(parallel.data_ranks)[parallel.data_rank].to(parallel.device)
        loss = functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
        # Gradients are summed over ranks: the loss is divided by the targets of the global batch.
        (loss / (BATCH * LENGTH)).backward()
        norm = parallel.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = parallel.sum_over_data_ranks(loss) / (BATCH * LENGTH)
        if parallel.first:
            print(f"step {step}  loss {mean.item():.12f}  gradient norm {norm.item():.12f}", flush=True)
    parallel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    main(**vars(parser.parse_args()))
