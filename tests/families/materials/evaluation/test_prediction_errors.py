"""Sums of errors by data set: against errors counted one by one, with labels missing and batches cut anyhow."""

from __future__ import annotations

import torch

from phalanx.families.materials.evaluation.prediction_errors import error_sums, predicted_quantities
from phalanx.families.materials.model.losses import Labels, Predictions
from phalanx.families.materials.model_config import EnergyHead, MaterialsModel, PropertyHead

NAN = float("nan")
MODEL = MaterialsModel(
    n_layers=1, d_model=4, energy=EnergyHead(force_weight=1.0), properties=PropertyHead(names=["gap", "moment"])
)
SOURCE = torch.tensor([1, 0, 1])
GRAPH = torch.tensor([0, 0, 1, 2, 2, 2])
ATOMS = torch.tensor([2, 1, 3])
LABELS = Labels(
    energy_G=torch.tensor([1.0, NAN, 3.0]),
    forces_N3=torch.tensor([[NAN] * 3, [NAN] * 3, [1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]),
    properties_GP=torch.tensor([[1.0, NAN], [2.0, 5.0], [NAN, NAN]]),
)
PREDICTED = Predictions(
    energy_G=torch.tensor([2.0, 7.0, 0.0]),
    forces_N3=torch.zeros(6, 3),
    properties_GP=torch.tensor([[1.5, 9.0], [0.0, 5.5], [9.0, 9.0]]),
)


def test_sums_are_those_of_errors_counted_one_by_one() -> None:
    sums = error_sums(
        MODEL, PREDICTED, LABELS, source_G=SOURCE, sources=2, graph_N=GRAPH, target_E=GRAPH, atoms_G=ATOMS
    )
    names = [quantity.name for quantity in predicted_quantities(MODEL)]
    assert names == ["energy", "forces", "stress", "gap", "moment"]
    found = {(source, name): sums[source, row].tolist() for source in (0, 1) for row, name in enumerate(names)}
    # Per atom: 1/2 and 3/3.
    assert found[1, "energy"] == [1.5, 1.25, 2.0] and found[0, "energy"] == [0.0, 0.0, 0.0]
    assert found[0, "forces"] == [6.0, 14.0, 3.0] and found[1, "forces"] == [9.0, 15.0, 9.0]
    assert found[0, "gap"] == [2.0, 4.0, 1.0] and found[1, "gap"] == [0.5, 0.25, 1.0]
    assert found[0, "moment"] == [0.5, 0.25, 1.0] and found[1, "moment"] == [0.0, 0.0, 0.0]
    assert found[0, "stress"] == found[1, "stress"] == [0.0, 0.0, 0.0]


def test_an_empty_batch_adds_nothing() -> None:
    empty = Labels(*(None if value is None else value[:0] for value in vars(LABELS).values()))
    nothing = Predictions(**{name: value for name, value in vars(empty).items() if value is not None})
    none = SOURCE[:0]
    sums = error_sums(MODEL, nothing, empty, source_G=none, sources=2, graph_N=none, target_E=none, atoms_G=none)
    assert sums.shape == (2, 5, 3) and not sums.any()
