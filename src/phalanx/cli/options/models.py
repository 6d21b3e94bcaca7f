"""Arguments, options and help of what is done with trained models: scores, text, forecasts, ensembles, pages, exports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from phalanx.cli.arguments import (
    PRECISION_NAMES,
    AveragedWeights,
    Device,
    Json,
    ModelPath,
    Overrides,
    PrecisionName,
    TokenizerPath,
)
from phalanx.families.language.huggingface.folder_files import DEFAULT_SHARD_BYTES

StructureRanks = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Share the structures among N ranks of this machine.")
]
PotentialPath = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Run directory, one checkpoint, or folder of an ensemble.")
]
EnergyBranch = Annotated[
    str | None, typer.Option(metavar="NAME", help="The data set whose energies are meant, of models with several.")
]
PotentialPrecision = Annotated[
    Literal["fp32", "fp64"] | None, typer.Option(help="Number format of activations; by default that of the run.")
]
"""Options of several subcommands for networks of atoms."""


@dataclass(frozen=True)
class EvaluateArguments:
    """Score a checkpoint on held-out text or in-context tasks: the newest one where a run directory is given.

    Each token of the split is a target once, given the tokens before it in its sample. With --tasks, questions are scored
    as LLM Foundry scores them; with --harness, as lm-evaluation-harness does.
    """

    checkpoint: ModelPath
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Questions (.jsonl, .jsonl.gz), or a list of tasks as LLM Foundry has (.yaml); repeatable.",
        ),
    ] = None
    harness: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A task, group or tag of lm-evaluation-harness (extra `harness`); repeatable."
        ),
    ] = None
    harness_tasks: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of further task files for --harness.")
    ] = None
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question, in place of what the task says.")
    ] = None
    questions: Annotated[
        int | None, typer.Option(min=1, help="Ask this many questions of each task, from the first; by default all.")
    ] = None
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Share samples, or the questions of tasks, among N ranks of this machine."
        ),
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="Folder that phalanx data prepare wrote; by default the data of the run.")
    ] = None
    split: Annotated[Literal["validation", "train"], typer.Option(help="Which part of the data.")] = "validation"
    samples: Annotated[
        int | None, typer.Option(min=1, help="Score this many samples, spread evenly over the split; by default all.")
    ] = None
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens a sample; by default that of the run (2048 for imported models).")
    ] = None
    tokenizer: TokenizerPath = None
    ema: AveragedWeights = False
    device: Device = "auto"
    precision: PrecisionName = None
    as_json: Json = False


@dataclass(frozen=True)
class GenerateArguments:
    """Write text with a checkpoint, from the newest one where a run directory is given.

    Text goes to stdout as it comes. It ends where the model ends the document, or after --tokens. With an empty prompt
    the model begins a document of its own.
    """

    checkpoint: ModelPath
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from stdin.")] = ""
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens to write at most; by default 128, or as many as there is room for."),
    ] = None
    temperature: Annotated[
        float, typer.Option(help="Below 1 safer, above 1 wilder; 0 takes the most likely token.")
    ] = 0.8
    top_k: Annotated[int | None, typer.Option(help="Draw among this many most likely tokens only.")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the fewest tokens that together have this probability.")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 0
    count: Annotated[int, typer.Option(min=1, help="Continuations to write, with seeds SEED, SEED+1, ...")] = 1
    tokenizer: TokenizerPath = None
    ema: AveragedWeights = False
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Share the continuations among N ranks of this machine.")
    ] = None
    device: Device = "auto"
    precision: PrecisionName = None
    as_json: Json = False


@dataclass(frozen=True)
class ConvertArguments:
    """Import or export weights: Llama, Mistral, Mixtral, Qwen and others; import a MACE of mace-torch or a ClimaX.

    Nothing is fetched from a network, and nothing is computed: every number is carried over as it is, unless --dtype
    rounds it. An import has no optimizer state; train from it with training.init_from=OUT. See docs/guides/convert.md.
    """

    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="Run directory, one checkpoint, a Hugging Face folder, or FILE.safetensors."),
    ]
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")]
    to: Annotated[
        Literal["huggingface", "phalanx"] | None, typer.Option(help="Form of OUT; by default the one IN does not have.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar=PRECISION_NAMES,
            help="Number format of OUT; by default that of IN for Hugging Face, and fp32 for Phalanx (training needs it).",
        ),
    ] = None
    tokenizer: TokenizerPath = None
    ema: AveragedWeights = False
    architecture: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Hugging Face's name of the model to write, where several compute the same."),
    ] = None
    shard_gb: Annotated[
        float, typer.Option(min=0.001, help="Largest weight file of a Hugging Face folder, in GB (10^9 bytes).")
    ] = DEFAULT_SHARD_BYTES / 1e9
    variables: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Of a ClimaX: its variables, in the order of default_vars; by default the 48 of the published ones.",
        ),
    ] = None
    heads: Annotated[
        int | None, typer.Option(min=1, help="Of a ClimaX: attention heads; by default 16, as in the published ones.")
    ] = None
    grid: Annotated[
        str | None,
        typer.Option(metavar="ROWSxCOLUMNS", help="Of a ClimaX: its grid; by default twice as wide as high."),
    ] = None
    as_json: Json = False


@dataclass(frozen=True)
class EnsembleArguments:
    """Make one model of several: mean, calibrated uncertainty, and how good both are on the test split.

    Members are chosen and calibrated on the validation split. DIR/ensemble.json is what later uses read: an ASE calculator
    takes DIR as it takes a run.
    """

    members: Annotated[
        list[str],
        typer.Argument(
            metavar="MEMBER...",
            help="Folders of runs or checkpoints, or of a study; with --train run files too. Fields to change may follow: "
            "section.field=value.",
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the ensemble is written.")]
    top: Annotated[
        int | None,
        typer.Option(min=2, metavar="K", help="Choose this many; by default all, of a study 5."),
    ] = None
    diversity: Annotated[
        float, typer.Option(min=0.0, help="Weight of disagreement when choosing: 0 goes by score alone.")
    ] = 1.0
    weights: Annotated[
        Literal["equal", "fitted"], typer.Option(help="Whether members count as validation says, or all alike.")
    ] = "fitted"
    calibration: Annotated[
        Literal["likeliest", "factor", "floor", "isotonic"],
        typer.Option(help="How spread becomes uncertainty; by default what held-out folds find likeliest."),
    ] = "likeliest"
    train: Annotated[bool, typer.Option("--train", help="Train the members first, anew, in DIR/members.")] = False
    seeds: Annotated[
        int | None, typer.Option(min=2, metavar="K", help="With --train: one configuration, K times with other seeds.")
    ] = None
    jobs: Annotated[
        int | None, typer.Option(min=1, help="With --train: runs side by side; by default one a device or core.")
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Structures, starts of forecasts or samples of text of each split; by default all."),
    ] = None
    side_by_side: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most members on a device at a time; by default by memory.")
    ] = None
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Start N ranks on this machine, which share the structures.")
    ] = None
    hours: Annotated[
        int | None, typer.Option(min=1, help="Weather: longest lead time to score; by default that trained on.")
    ] = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; by default DIR/report.html.")] = None
    device: Device = "auto"
    as_json: Json = False


@dataclass(frozen=True)
class ErrorsArguments:
    """Errors of a materials model on structures it has not been trained on.

    Energies count per atom; components of forces, stresses and dipoles count one each. Other structures than the
    run's are scored with fields to change, on the labels that they have. Structures with an element that no training
    structure of their branch had are counted, and said. With --matbench, predictions of any model are scored.
    """

    checkpoint: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Run directory (its newest whole checkpoint), or one checkpoint.")
    ]
    overrides: Overrides = None
    matbench: Annotated[
        Path | None,
        typer.Option(
            metavar="WBM.csv",
            help="MODEL is a CSV of formation energies instead: Matbench Discovery's metrics, beside its table of crystals.",
        ),
    ] = None
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Which part of the data.")] = "test"
    samples: Annotated[
        int | None, typer.Option(min=1, help="Take this many structures, spread evenly over the split; by default all.")
    ] = None
    nproc: StructureRanks = None
    device: Device = "auto"
    as_json: Json = False


@dataclass(frozen=True)
class SelectArguments:
    """Find the structures whose labels would teach an ensemble most: those its members are farthest apart about.

    They are written as extended XYZ, the widest spread first, for a calculation to label and prepare-graphs to read.
    Structures with an element that a member was not trained on are left out, and counted.
    """

    ensemble: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that phalanx ensemble wrote.")]
    pools: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files of structures (positions in angstrom), patterns of such, or folders of prepared structures.",
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE", help="The chosen structures, extended XYZ.")]
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Choose this many.")] = 100
    by: Annotated[
        Literal["forces", "energy"],
        typer.Option(help="The largest spread of an atom's force, or that of the energy by atom."),
    ] = "forces"
    branch: Annotated[
        str | None, typer.Option(metavar="NAME", help="The data set that is meant, of models with several.")
    ] = None
    nproc: StructureRanks = None
    device: Device = "auto"
    as_json: Json = False


@dataclass(frozen=True)
class PredictArguments:
    """Predict energies, forces and stresses of any number of structures, streamed to a folder of .npz files.

    Parts are whole or absent: the same command goes on after a kill, with any number of ranks. Rows are in the order of the
    files. Structures that cannot be computed have NaN, and are counted.
    """

    checkpoint: PotentialPath
    pools: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...", help="Files of structures, patterns of such, or folders of prepared structures."
        ),
    ]
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the parts are written.")]
    source: Annotated[
        str | None,
        typer.Option(metavar="FIELDS", help="Fields of a source for the files, as 'length_unit: bohr'; else angstrom."),
    ] = None
    branch: EnergyBranch = None
    precision: PotentialPrecision = None
    part: Annotated[int, typer.Option(min=1, metavar="N", help="Structures of a part.")] = 8192
    batch_atoms: Annotated[int, typer.Option(min=1, metavar="N", help="Atoms that are computed together, about.")] = (
        4096
    )
    nproc: StructureRanks = None
    device: Device = "auto"
    as_json: Json = False


@dataclass(frozen=True)
class LammpsArguments:
    """Run an input file of LAMMPS with a network as its potential, in this process and on one rank.

    The network stands behind the line "fix phalanx all external pf/callback 1 1" of the file. LAMMPS writes its output and
    log as it always does. See docs/guides/materials.md.
    """

    checkpoint: PotentialPath
    input: Annotated[Path, typer.Argument(metavar="INPUT", help="Input file of LAMMPS, with units metal or real.")]
    elements: Annotated[
        str, typer.Option(metavar='"H O"', help="Elements of the atom types 1, 2, ..., as pair_coeff has them.")
    ]
    branch: EnergyBranch = None
    charge: Annotated[
        float | None,
        typer.Option(metavar="E", help="Total charge; by default what the charges of the atoms add up to."),
    ] = None
    multiplicity: Annotated[int, typer.Option(min=1, help="2S + 1 of the whole structure.")] = 1
    dispersion: Annotated[
        str | None, typer.Option(metavar="FUNCTIONAL", help="Add the D3 dispersion of this functional.")
    ] = None
    untrained_elements: Annotated[
        bool, typer.Option("--untrained-elements", help="Compute elements that no training structure had, too.")
    ] = False
    precision: PotentialPrecision = None
    device: Device = "auto"


@dataclass(frozen=True)
class ForecastArguments:
    """Forecast from every time of a split, score all lead times, and write a page with curves and maps.

    Scores follow WeatherBench 2: area-weighted RMSE and anomaly correlation by variable and lead time, beside persistence
    and climatology. A checkpoint of any layout will do.
    """

    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory (its newest whole checkpoint), or one checkpoint.")
    ]
    overrides: Overrides = None
    hours: Annotated[int, typer.Option(min=1, help="Longest lead time to forecast and score.")] = 72
    split: Annotated[Literal["test", "validation", "train"], typer.Option(help="Which part of the data.")] = "test"
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="HOURS", help="Roll out in steps of this lead time; by default the fewest steps that do."
        ),
    ] = None
    starts: Annotated[
        int | None, typer.Option(min=1, help="Forecast from this many inputs, spread over the split; by default all.")
    ] = None
    members: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="M",
            help="Members of each forecast, of a model with noise; by default as many as in training.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR", help="Forecast with this model too, and test which differences are more than chance."
        ),
    ] = None
    shown: Annotated[
        list[str] | None, typer.Option("--map", metavar="VARIABLE", help="Variable to show as maps; may be repeated.")
    ] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page; by default forecast.html in RUN_DIR.")
    ] = None
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the forecasts themselves: FILE.zarr or FILE.nc.")
    ] = None
    times: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Forecast from the fields of this time alone, whose truth need not be known, into --out; may be repeated.",
        ),
    ] = None
    nproc: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Share the starts among N ranks of this machine.")
    ] = None
    device: Device = "auto"
    as_json: Json = False


@dataclass(frozen=True)
class ReportArguments:
    """Write one self-contained HTML page about a run: curves, samples, events, configuration, machine.

    Works on a finished run, a stopped one, and one that is still training.
    """

    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory that `phalanx train` wrote.")]
    out: Annotated[Path | None, typer.Option(help="HTML file to write; by default RUN_DIR/report.html.")] = None
    json_output: Annotated[bool, typer.Option("--json", help="Print the headline figures as one JSON object.")] = False
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Serve the page in place of writing it, and make it anew when the logs grow; studies too."
        ),
    ] = False
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve: the port; 0 takes any free one.")] = 8090
    host: Annotated[
        str,
        typer.Option(help="With --serve: the address to listen at. Others than this machine's own let others read."),
    ] = "127.0.0.1"


@dataclass(frozen=True)
class WatchArguments:
    """Show a run or a study on the terminal while it goes on: loss, speed, memory, ranks, goodput, events.

    Reads files alone, so it runs wherever the folder is seen, over ssh too, and disturbs nothing. Ctrl-C ends it. Without a
    terminal, as in a pipe, it prints one picture and ends.
    """

    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run directory, folder of a phalanx tune study, or file of a phalanx search study (*.search.log).",
        ),
    ]
    every: Annotated[float, typer.Option(min=0.2, metavar="SECONDS", help="Look for news this often.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False
