"""Speed and memory of torchtitan's own Trainer on blocks of Llama-3 8B or Qwen3-30B-A3B, to set beside `phalanx train`.

    python benchmarks/rivals/torchtitan_run.py --layers 8 --sequence-length 8192 --microbatch 2 --compile \
        --recompute none --json torchtitan.json
    torchrun --nproc-per-node 4 benchmarks/rivals/torchtitan_run.py ...

Everything a step does is torchtitan's: model, loss, optimizer, clipping, parallelism, train loop. Only the data loader,
the tokenizer and the place where losses are kept are given from here, through its `TrainSpec`. README.md beside this file
says which packages it needs and how it holds parameters.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# torchtitan's launch script sets this; the environment still decides.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import EventList

GIB = 2**30
ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    # Only to try this script out: torchtitan takes the device to be CUDA where torch finds no accelerator, so torch is made
    # to find one, before torchtitan looks.
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_stats=lambda device: {},
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=GIB),
    )

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: E402
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs  # noqa: E402
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.tools.utils import device_module  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

MODEL = "random_tokens"
TINY = {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048}
# Compiled pointwise and reduction kernels carry the names of all operators around them, attention too: they are not it.
ATTENTION = re.compile(
    r"(?!triton_(poi|red|per)_).*(scaled_dot_product|sdpa|flash|fmha|flex|triton_tem)", re.IGNORECASE
)


class RandomTokens(BaseDataLoader):
    """Endless batches of uniformly random token ids; each data-parallel rank has a stream of its own."""

    def __init__(self, vocabulary: int, microbatch: int, length: int, seed: int) -> None:
        self.vocabulary, self.shape = vocabulary, (microbatch, length + 1)
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Input and label token ids, int64 [microbatch, length] each, on the CPU as torchtitan's own loader gives them."""
        while True:
            tokens_BS = torch.randint(self.vocabulary, self.shape, generator=self.generator)
            yield {"input": tokens_BS[:, :-1].contiguous()}, tokens_BS[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from where `state_dict` stood."""
        self.generator.set_state(state_dict["generator"])


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan insists on a tokenizer; random token ids need none."""

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Not to be called."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Not to be called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Not to be called."""
        raise NotImplementedError


class RememberingMetrics(MetricsProcessor):
    """torchtitan's metrics, keeping what was logged."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logged: list[dict[str, float]] = []

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Keep the mean loss (nats a token) and the gradient norm before clipping, then log as torchtitan does."""
        self.logged.append({"step": step, "loss": global_avg_loss, "grad_norm": grad_norm})
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


class TimedTrainer(Trainer):
    """torchtitan's Trainer with a clock around each step; the step after the last timed one runs under the profiler."""

    def __init__(self, job: JobConfig, timed_steps: int) -> None:
        super().__init__(job)
        self.timed_steps = timed_steps
        self.step_seconds: list[float] = []
        self.peak_bytes = {"allocated": 0, "reserved": 0}
        self.events = EventList()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """One step of torchtitan's, timed from an idle device to an idle device."""
        if self.step > self.timed_steps:
            with torch.profiler.profile() as profiler:
                super().train_step(data_iterator)
                device_module.synchronize()
            self.events = profiler.key_averages()
            return
        device_module.synchronize()
        started = time.perf_counter()
        super().train_step(data_iterator)
        device_module.synchronize()
        self.step_seconds.append(time.perf_counter() - started)
        if not ON_CPU:
            # torchtitan clears the peak when it logs, which is after step 1: this is the peak of the steps from 2 on.
            self.peak_bytes = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }


def main() -> None:
    """Train for the steps asked for, print one line and write the figures."""
    options = parse()
    ensure_group_variables()
    register(options)
    init_logger()
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
        trainer = TimedTrainer(job_config(options, folder), options.steps)
        try:
            trainer.train()
            result = summarise(trainer, options)
        finally:
            trainer.close()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        write(options.json, result)
        print_line(result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["llama3-8b", "qwen3-30b-a3b"], default="llama3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=8192, help="tokens")
    parser.add_argument("--microbatch", type=int, default=2, help="samples on a rank in one forward pass")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=12, help="timed steps; one more runs under the profiler")
    parser.add_argument("--skip", type=int, default=4, help="first steps left out of the median")
    parser.add_argument("--compile", action="store_true", help="compile each block and the loss, as torchtitan does")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument(
        "--selective-option", default="op", help="'op', as torchtitan's 8B run file, or every n-th layer"
    )
    parser.add_argument("--dp-shard", type=int, default=-1, help="FSDP ranks; -1: all that are left")
    parser.add_argument("--dp-replicate", type=int, default=1, help="replicas (DDP, or HSDP with --dp-shard above 1)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, with sequence parallelism")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share experts, of those that share data")
    parser.add_argument("--async-tp", action="store_true", help="let the compiler overlap tensor-parallel exchanges")
    parser.add_argument("--reshard", choices=["default", "always", "never"], default="default", help="after forward")
    parser.add_argument("--attention", choices=["sdpa", "flex"], default="sdpa")
    parser.add_argument(
        "--float8", choices=["tensorwise", "rowwise"], help="8-bit matrix products but the head's; torchao"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a width of 256, to try the script out without a GPU")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if ON_CPU and options.attention == "flex":
        parser.error("--attention flex has no backward pass on a CPU: take sdpa to try the script out")
    if not 0 <= options.skip < options.steps:
        parser.error(f"--skip {options.skip} leaves none of {options.steps} steps: give from 0 to {options.steps - 1}")
    return options


def ensure_group_variables() -> None:
    """Describe a group of this process alone when torchrun described none; torchtitan always makes a group."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def model_spec(options: argparse.Namespace) -> tuple[TransformerModelArgs | Qwen3ModelArgs, TrainSpec]:
    """torchtitan's model with fewer layers, and what it trains it with. The flex mask is causal only, as SDPA's is."""
    if options.model == "qwen3-30b-a3b":
        moe = replace(qwen3.qwen3_args["30B-A3B"], n_layers=options.layers, attn_type=options.attention)
        moe = replace(moe, moe_args=replace(moe.moe_args, num_experts=16), **TINY) if options.tiny else moe
        return moe, qwen3.get_train_spec()
    args = replace(
        llama3.llama3_args["8B"], n_layers=options.layers, attn_type=options.attention, attn_mask_type="causal"
    )
    args = replace(args, multiple_of=64, **TINY) if options.tiny else args
    return args, llama3.get_train_spec()


def register(options: argparse.Namespace) -> None:
    """Make the model known to torchtitan under the name MODEL."""
    args, spec = model_spec(options)

    def data(dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> RandomTokens:
        training = job_config.training
        seed = options.seed + dp_rank
        return RandomTokens(args.vocab_size, training.local_batch_size, training.seq_len, seed)

    register_train_spec(
        MODEL,
        replace(
            spec,
            model_args={"fewer layers": args},
            build_dataloader_fn=data,
            build_tokenizer_fn=lambda job_config: NoTokenizer(),
            build_metrics_processor_fn=lambda job, parallel_dims, args: RememberingMetrics(job, parallel_dims),
            build_validator_fn=None,
            state_dict_adapter=None,
        ),
    )


def job_config(options: argparse.Namespace, folder: str) -> JobConfig:
    """torchtitan's defaults with the choices of its Llama-3 8B run file and of the command line."""
    job = JobConfig()
    job.job.dump_folder = folder
    job.job.description = "side by side"
    job.model.name, job.model.flavor = MODEL, "fewer layers"
    job.optimizer.lr = 3e-4
    job.lr_scheduler.warmup_steps = 2
    job.training.local_batch_size = options.microbatch
    job.training.global_batch_size = options.microbatch * options.accumulation * data_ranks(options)
    job.training.seq_len = options.sequence_length
    job.training.steps = options.steps + 1
    job.metrics.log_freq = options.steps + 1
    job.metrics.disable_color_printing = True
    job.parallelism.data_parallel_shard_degree = options.dp_shard
    job.parallelism.data_parallel_replicate_degree = options.dp_replicate
    job.parallelism.tensor_parallel_degree = options.tp
    job.parallelism.expert_parallel_degree = options.ep
    job.parallelism.enable_async_tensor_parallel = options.async_tp
    job.parallelism.fsdp_reshard_after_forward = options.reshard
    job.activation_checkpoint.mode = options.recompute
    job.activation_checkpoint.selective_ac_option = options.selective_option
    job.compile.enable = options.compile
    if options.float8 is not None:
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.filter_fqns = ["output"]
        # Tensor-wise is its default without a name, the only form that is gathered in 8 bits.
        job.quantize.linear.float8.recipe_name = None if options.float8 == "tensorwise" else options.float8
        job.quantize.linear.float8.enable_fsdp_float8_all_gather = options.float8 == "tensorwise"
        job.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp = options.float8 == "tensorwise"
        job.quantize.linear.float8.emulate = ON_CPU
    job.debug.seed = options.seed
    return job


def data_ranks(options: argparse.Namespace) -> int:
    """Ranks that read different samples."""
    return int(os.environ["WORLD_SIZE"]) // options.tp


def summarise(trainer: TimedTrainer, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the run; a step lasts as long as on the slowest rank, and the peak is the largest of the ranks."""
    device = "cpu" if ON_CPU else "cuda"
    seconds = torch.tensor(trainer.step_seconds, dtype=torch.float64, device=device)
    peaks = torch.tensor(list(trainer.peak_bytes.values()), dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    step_seconds = seconds.tolist()
    median = statistics.median(step_seconds[options.skip :])
    rate = options.microbatch * options.accumulation * options.sequence_length / median / options.tp
    kernels = kernel_times(trainer.events)
    settings = trainer.job_config.to_dict()
    del settings["job"]["dump_folder"]
    return {
        "program": f"torchtitan {importlib.metadata.version('torchtitan')}",
        "command": " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda},
        "device": "CPU" if ON_CPU else torch.cuda.get_device_name(),
        "allocator": os.environ["PYTORCH_ALLOC_CONF"],
        "ranks": dist.get_world_size(),
        "mixed_precision": "fully_shard" if trainer.parallel_dims.fsdp_enabled else "autocast over float32 parameters",
        "parameters": sum(parameter.numel() for parameter in trainer.model_parts[0].parameters()),
        "step_seconds": step_seconds,
        "median_step_seconds": median,
        "tokens_per_second_per_gpu": rate,
        "tokens_per_second_per_gpu_times_layers": rate * options.layers,
        "flops_per_token_as_torchtitan_counts": trainer.metrics_processor.num_flops_per_token,
        "peak_allocated_gib": peaks[0].item() / GIB,
        "peak_reserved_gib": peaks[1].item() / GIB,
        "attention_kernels": {name: ms for name, ms in kernels.items() if ATTENTION.match(name)},
        "longest_kernels": dict(list(kernels.items())[:25]),
        "logged": trainer.metrics_processor.logged,
        "job_config": settings,
        "model_args": asdict(trainer.model_args),
    }


def kernel_times(events: EventList) -> dict[str, float]:
    """Milliseconds in each kernel of the profiled step (on a CPU: in each operator), the longest first."""
    if ON_CPU:
        times = {event.key: event.self_cpu_time_total / 1e3 for event in events}
    else:
        # Annotated ranges are listed among the kernels that they contain.
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
        times = {kernel.key: kernel.self_device_time_total / 1e3 for kernel in kernels}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace `path` in one go, so that a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def print_line(result: dict[str, Any]) -> None:
    kernels = ", ".join(f"{name[:70]} {ms:.1f} ms" for name, ms in result["attention_kernels"].items())
    print(
        f"{result['program']}: median step {result['median_step_seconds'] * 1e3:.1f} ms, "
        f"{result['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
        f"{result['tokens_per_second_per_gpu_times_layers']:,.0f} tokens/s/GPU x layers, "
        f"peak allocated {result['peak_allocated_gib']:.2f} GiB, peak reserved {result['peak_reserved_gib']:.2f} GiB, "
        f"attention: {kernels or 'no kernel recognised'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
