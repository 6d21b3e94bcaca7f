"""The run file: one typed object for one run.

Every field a run file may hold is declared here with its type, its bounds and one sentence on what it does; `phalanx
config` and the error messages read those sentences. This module must not know how a file is found, merged or overridden
(`config.load`), nor what the values do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from phalanx.config.model import Model
from phalanx.config.section import (
    MAX_BATCH_SAMPLES,
    Layers,
    NonNegativeInt,
    PathText,
    PositiveInt,
    Ranks,
    Samples,
    Section,
    Seed,
    Words,
)
from phalanx.config.studies import Search, Tune
from phalanx.hardware.reliability import MTBF_HOURS

if TYPE_CHECKING:
    from phalanx.config.problems import Problem

Degree = Ranks | Literal["auto"]
BranchSizes = Annotated[list[Annotated[int, Field(ge=0, le=10**7)]], Field(min_length=1)]
SCALED_TOGETHER = {"fp8-block": 128, "mxfp8": 32}
"""Numbers along one dim that share a scale, in the precisions that scale blocks."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Options = Annotated[dict[str, bool | int | float | str], Words("a mapping of names to numbers, words, true or false")]
Patterns = Annotated[list[str], Words("a list of patterns of parameter names, as in head.*")]
"""Patterns as in fnmatch; `*` stands for any text."""
LearningRateRatios = Annotated[
    dict[str, Annotated[float, Field(gt=0.0, le=1e6)]],
    Words("a mapping of patterns of parameter names to factors, as in {head.*: 10}"),
]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
GlobalBatch = Annotated[
    Samples | Annotated[str, Field(pattern=r"^[1-9][0-9_]{0,17} (samples|tokens)$")],
    Words(f'a whole number of samples up to {MAX_BATCH_SAMPLES:,}, or of tokens as in "524288 tokens"'),
]


class BatchStage(Section):
    """Steps at the beginning of a run whose global batch is another one."""

    steps: PositiveInt
    """Optimizer steps of this stage."""
    global_batch: GlobalBatch
    """Samples an optimizer step of this stage, or tokens as in layout.global_batch."""


class Layout(Section):
    """How one model is spread over devices. The product of the degrees is the world size; one of them may be auto."""

    dp_replicate: Degree = 1
    """Data-parallel replicas of the whole (sharded) model."""
    dp_shard: Degree = "auto"
    """Data-parallel ranks that share what `zero` says; auto takes the rest, or is 1 where another degree is auto."""
    tp: Degree = 1
    """Tensor-parallel ranks: each keeps a part of every large matrix and of the positions between them."""
    cp: Degree = 1
    """Context-parallel ranks: each computes a part of every sample: positions of a text, atoms of structures."""
    pp: Degree = 1
    """Pipeline-parallel ranks: each keeps a part of the layers."""
    ep: Annotated[int, Field(ge=1, le=65536)] = 1
    """Expert-parallel ranks: as many of the ranks of dp_shard, cp and tp divide the experts of a mixture among them; the
    others hold the same experts."""
    expert_tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks over which the hidden features of each expert are sharded, where ep gives every rank a single one: ep x
    expert_tp ranks of dp_shard, cp and tp hold all experts. It is apart from tp, which splits all else."""
    ep_chunks: Annotated[int, Field(ge=1, le=16)] = 1
    """Parts of a micro-batch's tokens that travel to their experts one after the other, where ep is more than 1: the rows of
    one are under way while those of another are computed. Products are smaller then; results change by rounding alone."""
    ep_node: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Ranks of a node that pass rows of tokens on to each other: a row for another node goes to the rank of like place
    there, and from it to its expert's (two stages, fewer and larger messages). 1 sends rows to their experts' ranks at once;
    auto is the ranks of a node where ep spans nodes and messages would be small. It changes no result."""
    zero: Literal[0, 1, 2, 3] = 3
    """What is sharded over dp_shard (and cp) ranks: nothing, optimizer state (1), gradients too (2), parameters too (3)."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = "1f1b"
    """Order in which pipeline ranks compute micro-batches."""
    stages_per_rank: Layers | Literal["auto"] = "auto"
    """Pipeline stages on each rank; auto is 1 for gpipe and 1f1b, else 2."""
    context: Literal["auto", "ring", "all_to_all"] = "auto"
    """Context parallelism: keys and values travel a ring, or heads are exchanged; auto is the ring where it is exact and
    cheap (no ALiBi, no document mask), else the exchange where heads allow it."""
    tp_across_nodes: bool = False
    """Whether tensor-parallel groups may span nodes (slow on most networks)."""
    microbatch: Samples | Literal["auto"] = "auto"
    """Samples one rank computes at a time; auto is the largest number that divides what a rank computes, leaves a pipeline
    enough micro-batches and fits an accelerator's memory, by the planner's memory model and one step before the first. It
    changes no result."""
    global_batch: GlobalBatch
    """Samples an optimizer step over all ranks, or tokens when written as "524288 tokens"; never rounded."""
    batch_warmup: list[BatchStage] = Field(default_factory=list)
    """Stages with which a run begins, one after the other, before steps have global_batch samples; plans are for those."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, all but the costly ones, or all of each block."""
    precision: Literal[
        "fp32", "bf16", "fp16", "fp64", "fp8-tensor", "fp8-row", "fp8-row-experts", "fp8-block", "mxfp8"
    ] = "bf16"
    """Number format of activations and matmuls; master weights and optimizer state stay float32 (float64 for fp64). The fp8
    recipes multiply the matrices of blocks in 8 bits with one scale a tensor, a row, or a block of 128, and compute all else
    in bf16; fp8-row-experts (experimental) multiplies experts so too."""
    fp8_gradients: Literal["e4m3", "e5m2"] = "e4m3"
    """8-bit format of gradients in the fp8 recipes: of 3 digits, or of 2 and a wider range."""
    fp8_keep_ends: Annotated[int, Field(ge=0, le=1024)] = 0
    """Blocks at each end of the model that multiply in bf16 in the fp8 recipes."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether gathered parameters are freed between forward and backward (less memory, one more gather); needs zero=3,
    and auto does so there unless there are pipeline stages."""
    gather: Literal["layer", "stream"] = "layer"
    """What a rank gathers of a block's matrices (Hybrid-STOP): its whole tensor-parallel part, or chunk after chunk of it,
    two at a time (least memory; needs zero=3)."""
    gather_blocks: Layers = 1
    """Neighbouring blocks of a stage whose parameters are gathered, and gradients reduced, together: fewer and larger
    messages, for more memory."""
    gathers_ahead: Annotated[int, Field(ge=1, le=16)] = 1
    """How many of these gathers are under way ahead of the blocks that compute."""
    offload_optimizer: bool = False
    """Whether optimizer state lies in host memory between updates, and comes to the device for the update, that of some
    parameters at a time: less memory, longer updates, the same bits. Not for muon, which works on many matrices together."""
    offload_activations: bool = False
    """Whether what blocks keep for their backward passes, but for the last block of a pipeline stage, lies in host memory
    until then: it leaves while the next block computes, and comes back while that goes backward. Less memory, the same bits,
    no slower where copies are as fast as blocks; with recompute=full what leaves is the blocks' inputs alone."""
    branch_groups: Annotated[
        Literal["off", "auto"] | BranchSizes,
        Words("off, auto, or a list of ranks for each branch, as in [2, 1, 1]"),
    ] = "off"
    """Data-parallel ranks that read and compute each branch of a materials model and alone hold its heads; 0 puts a branch
    on the ranks of the one before, auto goes by cost, off leaves every branch on every rank."""
    peer_copies: bool | Literal["auto"] = "auto"
    """Whether sharded parameters and gradients, and parts of sequences beside the products of tp, travel inside a machine
    as copies between devices rather than by collective kernels; auto does so on accelerators that can read each other's
    memory."""

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, as `precision` asks for (Micikevicius et al. 2018, arXiv:1710.03740)."""
        # float16 has five bits of exponent: gradients below 6e-8 would vanish.
        return self.precision == "fp16"

    @property
    def peak_format(self) -> str:
        """The format whose peak MFU is a share of: that of bf16 for 8-bit recipes, which leave much in bf16."""
        return "bf16" if self.in_8_bits else self.precision

    @property
    def in_8_bits(self) -> bool:
        """Whether blocks multiply 8-bit numbers."""
        return "fp8" in self.precision


OWN_OPTIMIZERS = ("adamw", "adamw8bit", "lion", "muon")
"""Optimizers of Phalanx itself: `optimizer.name` is known to be one without loading it."""
MOMENT_BLOCK = 32
"""Columns of a parameter whose moments in 8 bits share a scale, and which no layout cuts (optimizer.name=adamw8bit)."""


class Optimizer(Section):
    """The optimizer and its learning-rate schedule."""

    name: str = "adamw"
    """Optimizer: adamw, adamw8bit (AdamW with moments in 8 bits), lion, muon (matrices by Muon, the rest by AdamW), or one
    that an installed package adds (entry points `phalanx.optimizers`)."""
    options: Options = Field(default_factory=dict)
    """Settings of an optimizer that a package adds, by the names that it gives them."""
    lr: Annotated[float, Field(gt=0.0)]
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment; of Lion what it weighs its momentum with in an update, and keeps of
    it."""
    momentum: DecayRate = 0.95
    """Share of Muon's momentum that each step keeps."""
    nesterov: bool = True
    """Whether Muon looks ahead: a step goes along the gradient and the momentum that it leads to, not that alone."""
    newton_schulz_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz steps in which Muon brings a matrix near an orthogonal one."""
    adamw_lr_ratio: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    """Learning rate of what Muon leaves to AdamW, over that of matrices."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """Term added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay, applied to the parameters that `no_decay` does not name."""
    no_decay: tuple[Literal["norm", "bias", "embedding"], ...] = ("norm", "bias", "embedding")
    """Kinds of parameter without weight decay."""
    grad_clip: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Largest gradient norm; null leaves gradients as they are (the norm is still logged)."""
    lr_ratios: LearningRateRatios = Field(default_factory=dict)
    """Factors of the learning rate, by patterns of parameter names; the first that matches counts, others have 1."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after warm-up; wsd stays at the peak, then decays over the last `decay_fraction`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from zero."""
    min_lr_ratio: Fraction = 0.1
    """Learning rate at the last step, as a share of `lr`."""
    decay_fraction: Fraction = 0.2
    """Share of all steps that the wsd schedule spends decaying."""


class StepWindow(Section):
    """A range of optimizer steps, first and last included."""

    first: PositiveInt
    """First step of the window (steps count from 1)."""
    last: PositiveInt
    """Last step of the window."""

    @model_validator(mode="after")
    def _ordered(self) -> StepWindow:
        if self.last < self.first:
            raise ValueError(f"last={self.last} comes before first={self.first}")
        return self


class AverageOfWeights(Section):
    """An exponential moving average of the weights, which is saved beside them."""

    decay: DecayRate
    """Share of the average that is kept whenever weights are added to it."""
    every: PositiveInt = 1
    """Optimizer steps from one addition to the next."""


class Transfer(Section):
    """What becomes of the parameters of the weights in `init_from` where the model is another one.

    Parameters of one name and shape are taken; whatever else there is must be named here."""

    rename: Annotated[dict[str, str], Words("a mapping of names here to names there, as in {head.a.*: head.b.*}")] = (
        Field(default_factory=dict)
    )
    """Parameters that have another name there, by their name here; stars stand for the same texts in both. Several may take
    the same one."""
    new: Patterns = Field(default=[])
    """Parameters that begin with their initial values, whatever the weights hold."""
    drop: Patterns = Field(default=[])
    """Parameters of the weights, by their name there, that the model has no use for."""
    resize: Patterns = Field(default=[])
    """Parameters that are taken though their shape, or what their rows stand for, is another: tables of positions and
    patches are interpolated; tokens, variables, elements and properties matched by name, new ones keep initial values."""

    def source_of(self, name: str) -> str:
        """Return the name in the weights of the parameter `name`: what its pattern's stars stand for is the same in both."""
        for pattern, there in self.rename.items():
            found = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name)
            if found:
                between = [*found.groups()[: there.count("*")], ""]
                return "".join(text for pair in zip(there.split("*"), between, strict=True) for text in pair)
        return name

    @field_validator("rename")
    @classmethod
    def _stars_pair(cls, rename: dict[str, str]) -> dict[str, str]:
        for pattern, there in rename.items():
            if there.count("*") > pattern.count("*"):
                raise ValueError(f"{pattern}: {there} has more stars than {pattern}, which say what they stand for")
        return rename


class LoRA(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): a matrix W stays and W + (alpha / rank) B A computes."""

    rank: Annotated[int, Field(ge=1, le=4096)]
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0.0, le=1e6)] = 16.0
    """What the product of an adapter is multiplied by, times its rank."""
    matrices: Annotated[Patterns, Field(min_length=1)] = Field(default=["blocks.*"])
    """Weights of linear layers that get an adapter, by their names; experts and tables of embeddings are none."""
    train: Patterns = Field(default=[])
    """Parameters that are trained themselves beside the adapters, such as a new head; all others are frozen."""


class CallbackChoice(Section):
    """A callback of a run."""

    name: str
    """Callback that an installed package adds (entry points `phalanx.callbacks`)."""
    options: Options = Field(default_factory=dict)
    """Settings of the callback, by the names that it gives them."""


RESUME_WORDS = ("auto", "must", "never")
"""Values of `training.resume` that are no path."""


class Training(Section):
    """How long and how to train, and what is logged."""

    steps: PositiveInt
    """Optimizer steps in the whole run, resumed parts included."""
    seed: Seed = 0
    """Seed of initialisation, data order and dropout."""
    run_dir: PathText | None = None
    """Folder of metrics, checkpoints and the resolved run file; by default runs/<name of the run file>."""
    resume: PathText = "auto"
    """auto: newest whole checkpoint if there is one; must: fail without one; never: refuse a folder with one; or a path."""
    init_from: PathText | None = None
    """Checkpoint whose weights a new run starts from, at step 0 with fresh optimizer state."""
    transfer: Transfer = Transfer()
    """What of the weights in `init_from` is taken, and how, where they are those of another model."""
    freeze: Patterns = Field(default=[])
    """Parameters that are not trained: they have neither gradients nor optimizer state."""
    lora: LoRA | None = None
    """Low-rank adapters, trained in place of all other parameters; null trains the parameters themselves."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile for each block; auto compiles on accelerators and not on CPU. Of materials: a whole training step as
    one program, which auto records there and true also compiles."""
    attention: Literal["auto", "sdpa", "cudnn", "flash", "efficient", "math", "flex", "flash4"] = "auto"
    """Attention kernel; auto measures those that can run this shape on this device and takes the fastest."""
    loss_chunk_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens whose logits are held at once by the fused output head and loss."""
    ema: AverageOfWeights | None = None
    """Moving average of the weights, for `phalanx evaluate`, `generate` and `convert` with --ema; null keeps none."""
    noise_scale_every: PositiveInt | None = None
    """Steps between estimates of the gradient noise scale, from which metrics and the report have the critical batch: larger
    ones save few steps. Needs an even number of micro-batches; null estimates nothing."""
    z_loss: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the squared log-partition term that keeps logits small (PaLM, section 5)."""
    flops: Literal["causal", "palm"] = "causal"
    """Model FLOPs convention: causal counts half of the attention matrix, palm counts all of it."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """What a NaN or infinite loss or gradient does: stop the run before the update, skip that update, or rewind the run to
    its newest checkpoint and pass over the samples since. Of fp16, whose loss scale is found by overflowing gradients, only
    a loss stops or rewinds it."""
    max_skipped_steps: PositiveInt = 20
    """Steps in a row without an update that end the run, whatever `on_nonfinite` says."""
    timeout_s: Annotated[float, Field(gt=0.0, le=86_400.0)] = 600.0
    """Seconds after which a rank that waits for another one gives up, in whatever they exchange."""
    deterministic: bool = False
    """Only kernels that give the same bits every time; slower on accelerators."""
    log_every: PositiveInt = 1
    """Steps between printed lines; metrics.jsonl holds every step."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run folder."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the wandb package)."""
    mlflow: str | None = None
    """MLflow experiment to log to (needs the mlflow package)."""
    profile: StepWindow | None = None
    """Steps to record with the profiler; a Chrome trace goes to the run folder."""
    memory_snapshot: StepWindow | None = None
    """Steps whose allocator history is written to the run folder (accelerators only)."""
    callbacks: Annotated[
        list[
            Annotated[
                CallbackChoice, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
            ]
        ],
        Words("a list, each a name or a mapping with name and options"),
    ] = Field(default_factory=list)
    """What the run does beside training: callbacks that installed packages add, called in this order on every rank."""

    @property
    def resume_path(self) -> Path | None:
        """The path that `resume` names; None where it is one of `RESUME_WORDS`."""
        return None if self.resume in RESUME_WORDS else Path(self.resume)


class Checkpoint(Section):
    """When training state is written, and how much of it is kept."""

    every: PositiveInt | Literal["auto"] | None = None
    """Steps between checkpoints; null writes only the last step. auto chooses what loses least (Young, Daly) by the measured
    durations of saves and steps and by cluster.mtbf_hours, anew after each checkpoint."""
    last: bool = True
    """Whether the last step is written too, whatever `every` says; false suits benchmarks."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep for good each checkpoint whose step is a multiple of this."""
    asynchronous: bool = True
    """Write in the background; training waits only for the copy of the state."""
    upload: (
        Annotated[
            str,
            Field(pattern=r"^[A-Za-z0-9+.-]+://[^/\s]\S*$"),
            Words("an address, such as s3://bucket/runs/a"),
        ]
        | None
    ) = None
    """Address to which each checkpoint is copied in the background once it is written (`s3://bucket/runs/a`, `gs://...`),
    and from which a run resumes whose directory has none as new. Keeps as many there as here; null copies nothing."""
    memory_every: PositiveInt | None = None
    """Steps between copies of each rank's state in the memory of its node and of another node, from which ranks that begin
    again in the same layout go on; storage serves where copies are gone. Takes up to five times a node's state of host
    memory. null makes none."""


class Restart(Section):
    """What `phalanx train --nproc` does when a rank fails or hangs."""

    max: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts in a row that may begin from the same checkpoint; then the run ends with exit code 93. 0 never restarts, nor
    does a process alone do a step again with smaller micro-batches where memory ran out."""
    layout: Literal["same", "replan"] = "same"
    """What becomes of a rank's place (its device; over several nodes its node) that fails twice in a row without a newer
    checkpoint in between, or of a node that is lost: it is tried again (same), or left out, and the run goes on in the
    nearest legal layout for what is left, with the same global batch (replan)."""
    backoff_s: Annotated[float, Field(ge=0.0, le=3600.0)] = 5.0
    """Seconds before the second restart from the same checkpoint, doubled for each further one; the first does not wait."""
    heartbeat_s: Annotated[float, Field(ge=0.5, le=86_400.0)] = 60.0
    """Seconds without a sign of life, within a step, after which a rank counts as hung; a step that takes longer by nature
    raises it to five times the longest wait so far."""
    slow_s: Annotated[float, Field(ge=0.5, le=86_400.0)] = 1800.0
    """The same for what takes unforeseen time: start and first step (which compiles), a checkpoint, an evaluation."""


LessMemory = Literal["halve", "recompute", "offload"]


class Safeguards(Section):
    """What a run does about memory that runs out, data that cannot be read, and wrong numbers that are finite."""

    on_out_of_memory: Annotated[list[LessMemory], Words("a list of halve, recompute and offload")] = Field(
        default=["halve"]
    )
    """What a run takes less memory by once it has run out, in this order, each as far as it goes: half the micro-batch; more
    recompute, selective and then full; optimizer state in host memory, and then activations. None of these changes a
    gradient but for rounding; without any left the run ends and names what else there is."""

    on_bad_data: Literal["stop", "skip"] = "stop"
    """What a batch does that some rank cannot read (cut short, altered, ids outside the vocabulary): the run ends, or all
    ranks pass over it, up to training.max_skipped_steps of them in a row; its samples are kept in bad_batches/."""

    on_spike: Literal["warn", "skip", "rewind"] = "warn"
    """What a loss or gradient norm far above those of the last 64 steps does: a warning, the update left out, or the run
    rewound to its newest checkpoint, from where it passes over the samples since."""
    spike_deviations: Annotated[float, Field(ge=1.0, le=1e6)] = 20.0
    """Robust standard deviations (1.4826 times the median absolute deviation; at least 1% of the median loss, 50% of the
    median gradient norm) above the median that make a spike."""
    max_rewinds: Annotated[int, Field(ge=0, le=1000)] = 3
    """Rewinds to the same checkpoint that a run may take; one more ends it."""
    replay: bool = False
    """Whether a step that is a spike or not finite is done again before anything follows from it, on all ranks: a transient
    fault of a device is gone then and costs one step, and what comes again is of the samples or the software. Each step is
    then read before the next one is launched."""
    compare_replicas: PositiveInt | None = None
    """Steps between comparisons of the parameters that several ranks hold alike, by a hash of their bits; each checkpoint
    has one before it. Where they differ, the run is rewound and the steps are done again. null compares nothing."""


class Evaluation(Section):
    """Held-out scores during training."""

    every: PositiveInt | None = None
    """Steps between evaluations; null evaluates after the last step only."""
    samples: PositiveInt = 256
    """Held-out samples an evaluation reads; the same ones every time."""


class Cluster(Section):
    """The devices of this run."""

    device: str = "auto"
    """Device type: auto takes the accelerator PyTorch finds, else the CPU."""
    devices_per_node: Ranks | None = None
    """Devices that share a node; null takes the launcher's word for it."""
    peak_tflops: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """Nominal peak of one device in TFLOP/s at the run's precision, where the built-in table has no entry."""
    mtbf_hours: Annotated[float, Field(ge=0.01, le=1e9)] = MTBF_HOURS
    """Mean hours between failures of one node that stop the run, for checkpoint.every=auto. The default is of Llama 3's
    training on nodes of eight devices; `phalanx launch` passes on what the machine's description says."""


class Remote(Section):
    """What is kept on this machine of data and weights that are named by address (`s3://`, `gs://`, `https://`, ...)."""

    cache: PathText | None = None
    """Folder for what was read; null takes phalanx/remote in the user's cache folder."""
    cache_gb: Annotated[float, Field(ge=0.001, le=1e6)] = 16.0
    """Size of that folder in GB; beyond it, what was used longest ago is deleted."""
    timeout_s: Annotated[float, Field(ge=0.1, le=86_400.0)] = 60.0
    """Seconds that a store may take to answer, asked again within them."""


class Run(Section):
    """A whole run file, of any model family; each family has its own kind, with the types of its `model` and `data`."""

    model: Model
    data: Section
    layout: Layout
    optimizer: Optimizer
    training: Training
    checkpoint: Checkpoint = Checkpoint()
    evaluation: Evaluation = Evaluation()
    restart: Restart = Restart()
    safeguards: Safeguards = Safeguards()
    cluster: Cluster = Cluster()
    remote: Remote = Remote()
    search: Search = Search()
    tune: Tune = Tune()

    def find_problems(self) -> Iterable[Problem]:
        """Return what of this kind of run does not fit together across sections; by default nothing.

        Reads the run file alone: allocates nothing, and knows no device and no number of ranks.
        """
        return ()

    def find_training_problems(self) -> Iterable[Problem]:
        """Return likewise what keeps such a run from training, though a trained model may be used on its data."""
        return ()

    @property
    def names_parameters(self) -> bool:
        """Whether there is something to check that takes the built model: weights to begin with, patterns of parameters."""
        training = self.training
        return bool(training.init_from or training.freeze or training.lora or self.optimizer.lr_ratios)

    @property
    def sample_tokens(self) -> int | None:
        """Tokens of a sample, for families whose batches are counted in tokens; by default None."""
        return None

    @property
    def data_names(self) -> list[str]:
        """What the data are called, for a person; by default nothing."""
        return []
