"""What may be chosen, in a run file: ranges, conditions, constraints, and what is refused before anything runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from phalanx.config.load import parse_run
from phalanx.config.schema import Run
from phalanx.errors import ConfigError
from phalanx.families.registry import bind
from phalanx.study.hyperparameters.candidates import CostModel, TrialSize, measure_size
from phalanx.study.hyperparameters.hyperparameter_space import build_hyperparameter_space
from phalanx.study.hyperparameters.metric import evaluation_at, read_figure
from phalanx.study.samplers import Observation, make_sampler
from phalanx.study.space import Choices, Integers, Reals
from phalanx.study.trial import key_of

RUN = """\
model: {n_layers: 2, d_model: 32, n_heads: 4, d_ff: 64, vocab_size: 257, max_positions: 64, mlp: gelu}
data: {sources: [data/a], sequence_length: 64}
layout: {global_batch: 8}
optimizer: {lr: 1e-3}
training: {steps: 9}
tune:
  parameters:
    optimizer.lr: {low: 1e-4, high: 1e-1, log: true}
    model.d_model: {low: 16, high: 64, step: 16}
    model.mlp: [gelu, swiglu]
    model.d_ff: {low: 32, high: 128, log: true, when: model.mlp == 'gelu'}
  constraints: [model.d_model * model.n_layers <= 100]
"""


def run_of(text: str = RUN, *words: str) -> Run:
    return parse_run(text, "run.yaml", words)


def test_a_space_from_a_run_file() -> None:
    space = build_hyperparameter_space(run_of())
    assert space.ranges == {
        "optimizer.lr": Reals(1e-4, 1e-1, True),
        "model.d_model": Integers(16, 64, step=16),
        "model.mlp": Choices(("gelu", "swiglu")),
        "model.d_ff": Integers(32, 128, log=True),
    }
    default = space.default()
    assert default == {"optimizer.lr": 1e-3, "model.d_model": 32, "model.mlp": "gelu", "model.d_ff": 64}
    other = space.drop_inapplicable({**default, "model.mlp": "swiglu"})
    assert "model.d_ff" not in other and space.meets_constraints(other)
    # A constraint sees fields of the run file that nobody chooses.
    assert not space.meets_constraints({**default, "model.d_model": 64})
    run = space.run_of({"model.d_model": 48, "optimizer.lr": 0.5}, ["training.seed=3"])
    assert (run.model.d_model, run.optimizer.lr, run.training.seed) == (48, 0.5, 3)  # type: ignore[attr-defined]
    assert build_hyperparameter_space(run_of(RUN, "optimizer.lr=1.0")).default() == {}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("model.d_model: {low", "model.d_modell: {low", "nearest: model.d_model"),
        ("optimizer.lr: {", "training.steps: {", "cannot be chosen: it is what rungs count"),
        ("optimizer.lr: {", "checkpoint.every: {", "cannot be chosen"),
        ("high: 1e-1", "high: 1e-9", "low=0.0001 must be less than high=1e-09"),
        ("low: 1e-4", "low: 0.0", "has no logarithm"),
        ("[gelu, swiglu]", "{values: [gelu, swiglu], log: true}", "log and step belong to low and high"),
        ("[gelu, swiglu]", "[gelu]", "leaves nothing to choose"),
        ("n_layers <= 100", "depth <= 100", "model.depth is not known"),
        ("n_layers <= 100", "n_layers < 1", "none of 2,000 choices drawn at random meets model.d_model"),
        ("model.mlp == 'gelu'", "__import__('os')", "is not known"),
    ],
)
def test_what_is_refused(before: str, after: str, said: str) -> None:
    assert before in RUN
    with pytest.raises(ConfigError, match=said):
        build_hyperparameter_space(run_of(RUN.replace(before, after)))


def test_engines_propose_what_is_new_and_allowed() -> None:
    space = build_hyperparameter_space(run_of())
    taken: set[str] = set()
    for number in range(12):
        proposal = make_sampler("random", space, 1).propose([], taken)
        assert proposal is not None and len(taken) == number
        values = proposal.values
        assert key_of(values) not in taken and space.meets_constraints(values)
        taken.add(key_of(values))
    again = [make_sampler("random", space, 1).propose([], taken) for _ in range(2)]
    assert again[0] == again[1]
    lr = [10.0 ** (-4 + 0.1 * number) for number in range(30)]
    history = [Observation({**space.default(), "optimizer.lr": one}, abs(math.log10(one) + 2)) for one in lr]
    found = [make_sampler("optuna-tpe", space, number).propose(history, set()) for number in range(10)]
    near = [abs(math.log10(float(one.values["optimizer.lr"])) + 2) for one in found if one]  # type: ignore[arg-type]
    assert len(near) == 10 and np.median(near) < 0.5
    few = build_hyperparameter_space(
        run_of(RUN.replace("{low: 1e-4, high: 1e-1, log: true}", "[0.1, 0.2]"), "tune.constraints=[]")
    )
    small = {f'{{"optimizer.lr":{one}}}' for one in (0.1, 0.2)}
    alone = build_hyperparameter_space(
        run_of(RUN[: RUN.index("    model.d_model: {low")].replace("{low: 1e-4, high: 1e-1, log: true}", "[0.1, 0.2]"))
    )
    assert few.ranges and make_sampler("random", alone, 0).propose([], small) is None


def test_costs_are_learned_from_finished_trials() -> None:
    space = build_hyperparameter_space(run_of())
    base = measure_size(bind(run_of()))
    model = CostModel(space.ranges, base, accelerator=False)
    random = np.random.default_rng(0)
    before, after = [], []
    for number in range(40):
        values = space.drop_inapplicable({one.name: one.range.draw(random) for one in space.parameters})
        size = measure_size(bind(space.run_of(values)))
        # A device 30 times as fast as believed, on which one option is slow, and shared trials slow each other a little.
        k = float(1 + number % 3)
        truth = (2e-4 + size.flops / 1.5e11) * (4.0 if values["model.mlp"] == "swiglu" else 1.0) * k**0.4
        error = abs(math.log(model.step_seconds(size, values, k) / truth))
        (after if number >= 20 else before).append(error)
        model.learn(size, values, truth * math.exp(0.05 * random.standard_normal()), 3.0 * size.bytes, k)
    assert np.median(after) < 0.2 < before[0]
    assert 2.5 < model.memory(base, space.default()) / base.bytes < 6.0


def test_larger_models_are_expected_to_cost_more() -> None:
    small, large = (
        measure_size(bind(run_of(RUN, f"model.d_model={width}", f"model.d_ff={4 * width}"))) for width in (32, 512)
    )
    model = CostModel({}, small, accelerator=False)
    assert large.flops > 50 * small.flops and large.bytes > small.bytes
    assert model.step_seconds(large, {}) > 5 * model.step_seconds(small, {})
    assert model.step_seconds(small, {}, 2.0) > 1.5 * model.step_seconds(small, {})
    assert isinstance(small, TrialSize)


ERRORS = {
    "kind": "evaluation",
    "step": 4,
    "loss": 0.5,
    "errors": [
        {"source": "xtb", "quantity": "forces", "unit": "eV/A", "mae": 0.1, "rmse": 0.3},
        {"source": "xtb", "quantity": "energy", "unit": "eV/atom", "mae": 7.0, "rmse": 9.0},
        {"source": "xtb.2", "quantity": "forces", "unit": "eV/A", "mae": 0.3, "rmse": 0.5},
    ],
}


def test_the_figure_that_is_minimised() -> None:
    assert read_figure(ERRORS, "loss") == 0.5
    assert read_figure(ERRORS, "errors.forces.mae") == pytest.approx(0.2)
    assert read_figure(ERRORS, "errors.xtb.forces.mae") == 0.1 and read_figure(ERRORS, "errors.xtb.2.forces.mae") == 0.3
    with pytest.raises(ConfigError, match=r"no such figure; it has .*errors\.xtb\.forces\.mae, .*loss"):
        read_figure(ERRORS, "errors.stress.mae")


def test_only_whole_lines_of_a_log_count(tmp_path: Path) -> None:
    line = '{"kind": "evaluation", "step": 4, "loss": 1.0}\n'
    (tmp_path / "events.jsonl").write_text(line + line.replace("1.0", "2.0") + line[:20])
    found = evaluation_at(tmp_path, 4)
    assert found is not None and found["loss"] == 2.0 and evaluation_at(tmp_path, 5) is None
