"""In-context scores of `phalanx evaluate` beside those of lm-evaluation-harness on the exported model, task by task.

    python benchmarks/in_context_against_lm_eval.py TASKS --text TEXT --tokenizer tokenizer.json --questions 50 \
        --out benchmarks/results/evaluation/NAME.json

TASKS is LLM Foundry's folder local_data. Trains a small decoder on TEXT for some steps, exports it, and scores ten tasks
three ways: by Phalanx on the run's checkpoint, by the harness with `transformers` on the exported folder, and by the harness
with `PhalanxLM`. All in float32 on the CPU, without examples, from the same local files. The result holds every score and
the largest difference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import datasets
import lm_eval
import torch
import yaml

from phalanx.cli.main import run_command_line
from phalanx.families.language.evaluation.icl_tasks import Task, load_tasks
from phalanx.families.language.evaluation.in_context import score_tasks
from phalanx.families.language.evaluation.lm_harness import PhalanxLM
from phalanx.families.language.evaluation.load_weights import load_for_inference

CHOICES = (
    "commonsense_reasoning/copa",
    "commonsense_reasoning/piqa",
    "commonsense_reasoning/siqa",
    "commonsense_reasoning/openbook_qa",
    "commonsense_reasoning/commonsense_qa",
    "world_knowledge/arc_easy",
    "world_knowledge/arc_challenge",
)
CONTINUED = (
    "language_understanding/lambada_openai_small",
    "world_knowledge/jeopardy_small",
    "world_knowledge/bigbench_qa_wikidata",
)


def main() -> None:
    """Train, export, score three ways, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scores = compare(asked, Path(folder))
    worst = max(max(score["differences"].values()) for score in scores)
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "lm-eval", "tokenizers")}
    result = {
        "command": shlex.join(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "largest_difference": worst,
        "tasks": scores,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"largest difference {worst:.2g}")


def compare(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return each task's scores of the three ways, and how far they lie apart."""
    train(asked, folder)
    tasks = load_tasks([asked.tasks / f"{name}.jsonl" for name in (*CHOICES, *CONTINUED)])
    loaded = load_for_inference(folder / "run", torch.device("cpu"), dtype=torch.float32)
    ours = score_tasks(loaded, tasks, questions=asked.questions)
    configs = [harness_config(task, asked.questions) for task in tasks]
    arguments = {"pretrained": str(folder / "hf"), "dtype": "float32", "device": "cpu"}
    exported = run_harness("hf", configs, arguments)
    adapted = run_harness(PhalanxLM(loaded), configs, None)
    found = []
    for task, score in zip(tasks, ours, strict=True):
        names = {"acc": score.accuracy_sum, "acc_norm": score.accuracy_per_character}
        if task.kind == "language_modeling":
            names = {"acc": score.accuracy, "perplexity": score.perplexity}
        rows = {"phalanx": names, "hf": exported[task.name], "adapter": adapted[task.name]}
        # Perplexities are large numbers: relative.
        differences = {
            name: max(abs(rows[way][name] - value) / max(1.0, value) for way in ("hf", "adapter"))
            for name, value in names.items()
        }
        found.append(
            {"task": task.name, "questions": score.questions, "foundry_accuracy": score.accuracy}
            | {"scores": rows, "differences": differences}
        )
    return found


def train(asked: argparse.Namespace, folder: Path) -> None:
    """Train a decoder of four layers in `folder`/run and export it to `folder`/hf."""
    text = [str(asked.text), "--tokenizer", str(asked.tokenizer), "--validation-fraction", "0.01", "--workers", "1"]
    vocabulary = len(json.loads(asked.tokenizer.read_text())["model"]["vocab"]) + 64
    model = {"n_layers": 4, "d_model": 128, "n_heads": 4, "vocab_size": vocabulary, "max_positions": 512}
    run = {
        "model": model,
        "data": {"sources": [str(folder / "data")], "sequence_length": 128},
        "layout": {"global_batch": 8, "precision": "fp32"},
        "optimizer": {"lr": 3e-3},
        "training": {"steps": asked.steps},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    for words in (
        ["data", "prepare", *text, "--out", str(folder / "data")],
        ["train", str(folder / "run.yaml"), "--run-dir", str(folder / "run")],
        ["convert", str(folder / "run"), str(folder / "hf")],
    ):
        if run_command_line(words):
            raise SystemExit(f"phalanx {shlex.join(words)} failed")


def harness_config(task: Task, questions: int) -> dict[str, Any]:
    """Return `task` as the harness describes one; its prompts are Phalanx's, the scoring the harness's own."""
    prompts = task.prompts(questions)
    rows = [
        {"text": prompt.contexts[0], "choices": list(prompt.continuations), "gold": prompt.gold} for prompt in prompts
    ]
    common = {
        "task": task.name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "text",
        "target_delimiter": " ",
        "num_fewshot": 0,
    }
    if task.kind == "multiple_choice":
        names = ["acc", "acc_norm"]
        kind = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"}
    else:
        names = ["acc", "perplexity"]
        # The harness puts its delimiter before choices, not before a lone target.
        kind = {"output_type": "loglikelihood", "doc_to_target": lambda row: " " + row["choices"][0]}
    metrics = [
        {
            "metric": n,
            "aggregation": "perplexity" if n == "perplexity" else "mean",
            "higher_is_better": n != "perplexity",
        }
        for n in names
    ]
    return common | kind | {"metric_list": metrics}


def run_harness(
    model: Any, configs: list[dict[str, Any]], arguments: dict[str, Any] | None
) -> dict[str, dict[str, float]]:
    """Return the harness's metrics by task and name."""
    # Configurations are changed by the harness.
    tasks = [dict(config) for config in configs]
    result = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=tasks, batch_size=8, bootstrap_iters=0)
    return {
        task: {name.split(",")[0]: value for name, value in found.items() if isinstance(value, float)}
        for task, found in result["results"].items()
    }


if __name__ == "__main__":
    main()
