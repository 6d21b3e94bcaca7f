"""Language models together: the loss of their mean probability, by the definition."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from phalanx.cli.models.ensemble import print_ensemble
from phalanx.config.load import load_run
from phalanx.ensemble.members import open_member, read_ensemble
from phalanx.errors import ConfigError
from phalanx.families.language.data.open_tokens import open_source
from phalanx.families.language.ensemble import build_language
from phalanx.families.language.evaluation.held_out import score_model
from phalanx.families.language.evaluation.load_weights import load_for_inference
from phalanx.report.ensemble_page import render_ensemble
from phalanx.training.start import train
from token_data import write_run_file, write_token_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("language")
    run_file = write_run_file(folder / "run.yaml", write_token_folder(folder / "data", train_tokens=20_000))
    for seed in (1, 2):
        words = [f"training.seed={seed}", "training.steps=6"]
        train(load_run(run_file, words), folder / f"member-{seed}")
    return [folder / f"member-{seed}" for seed in (1, 2)]


def test_the_mean_of_probabilities_by_definition(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = build_language([open_member(run) for run in runs], CPU)
    loaded = [load_for_inference(run, CPU) for run in runs]
    assert found.losses == pytest.approx([score_model(one).total.loss for one in loaded], rel=1e-5)
    run = loaded[0].run
    assert run is not None
    source = open_source(Path(run.data.sources[0].path), "validation")
    assert source is not None
    length, total = run.data.sequence_length, 0.0
    tokens = torch.from_numpy(source.read(torch.tensor([0]).numpy(), source.tokens)[0].astype("int64"))
    for start in range(0, len(tokens) - 1, length):
        part = tokens[start : start + length + 1]
        mean = torch.stack([one.model.logits(part[None, :-1])[0].softmax(-1) for one in loaded]).mean(0)
        total += float(F.nll_loss(mean.log(), part[1:], reduction="sum"))
    assert found.together.tokens == len(tokens) - 1
    assert found.together.nats == pytest.approx(total, rel=1e-4)
    assert found.together.loss < sum(found.losses) / 2
    few = build_language([open_member(run) for run in runs], CPU, samples=2)
    assert few.together.tokens == 2 * length
    found.document(tmp_path).write(tmp_path)
    assert read_ensemble(tmp_path).family == "language"
    print_ensemble(found.summary())
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"  loss {found.together.loss:.4f}  their mean")
    page = render_ensemble(found.summary())
    assert f"{found.together.loss:.4f}" in page and page.count("<tr>") == 3


def test_members_read_the_same_text(runs: list[Path]) -> None:
    first, other = open_member(runs[0]), open_member(runs[1], ["data.sequence_length=16"])
    with pytest.raises(ConfigError, match=r"member-2 differs from .* in data.sequence_length: 16, not \d+; members"):
        build_language([first, other], CPU)
