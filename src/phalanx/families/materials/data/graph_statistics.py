"""What is known of a training split: elements, degrees, spreads of labels, and the energy of an atom of each element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from phalanx.errors import DataError
from phalanx.families.materials.config import GraphSource
from phalanx.families.materials.data.array_files import Arrays, ragged_ranges
from phalanx.families.materials.data.graph_shards import SPLITS, LabelStatistics, PreparedSource, Statistics
from phalanx.families.materials.data.labels import KINDS, FloatArray, labels_of
from phalanx.families.materials.data.structures import ELEMENTS, total_charges
from phalanx.families.materials.model_config import PROPERTY_HEADS

_TRAIN = SPLITS.index("train")
_ROUNDING = 1e-9
"""Share of an energy an atom that sums of squares do not resolve."""


def gather_statistics(shards: Sequence[Arrays], source: GraphSource) -> Statistics:
    """Return statistics over the training structures of all shards.

    Raises DataError when a label is missing in every structure: its name in the files is then wrong.
    """
    elements = np.zeros(ELEMENTS + 1, dtype=np.int64)
    degrees = np.zeros(1, dtype=np.int64)
    totals: Counter[int] = Counter()
    unknown = 0
    for shard in shards:
        elements += np.bincount(_training_composition(shard)[1], minlength=ELEMENTS + 1)
        first_atom = np.repeat(shard["node_starts"][:-1], np.diff(shard["edge_starts"]))
        incoming = np.bincount(first_atom + shard["target"], minlength=int(shard["node_starts"][-1]))
        found = np.bincount(incoming[_training_atoms(shard)])
        # Shards differ in their largest degree.
        degrees = _pad_counts(degrees, len(found)) + _pad_counts(found, len(degrees))
        given_G, charges_N = shard.get("total_charge"), shard.get("charges")
        if given_G is not None or charges_N is not None:
            atoms_G = np.diff(shard["node_starts"])
            graph_N = np.repeat(np.arange(len(atoms_G)), atoms_G)
            charge_G = total_charges(given_G, charges_N, graph_N, len(atoms_G))
            totals.update(np.rint(charge_G[~np.isnan(charge_G)]).astype(int).tolist())
            unknown += int(np.isnan(charge_G).sum())
    present = np.flatnonzero(elements)
    energies, deviation = fit_reference_energies(shards, present) if "energy" in source.labels else ({}, None)
    labels: dict[str, LabelStatistics] = {}
    for name in source.labels:
        labels[name] = _label_statistics(shards, name, _training_atoms if KINDS[name].per_atom else _training_rows)
    for head, rows_of in zip(PROPERTY_HEADS, (_training_rows, _training_atoms, _training_edges), strict=True):
        for column, given in enumerate(getattr(source, head)):
            labels[given] = _label_statistics(shards, head, rows_of, column)
    features = {
        name: [_label_statistics(shards, name, rows_of, column) for column in range(shards[0][name].shape[1])]
        for name, rows_of in _FEATURE_ROWS.items()
        if name in shards[0]
    }
    for feature, known in features.items():
        other = next((shard for shard in shards if shard[feature].shape[1] != len(known)), None)
        if other is not None:
            raise DataError(
                f"{source.path}: graphs have {len(known)} and {other[feature].shape[1]} {feature}; give all of them as many"
            )
    absent = [label for label in labels_of(source) if labels[label.name].numbers == 0]
    if absent:
        raise DataError(
            f"{source.path}: no training structure has {absent[0].name} under the name {absent[0].key}; correct its key"
        )
    return Statistics(
        elements={int(element): int(elements[element]) for element in present},
        largest_atoms=max(int(np.diff(shard["node_starts"]).max()) for shard in shards),
        largest_edges=max(int(np.diff(shard["edge_starts"]).max()) for shard in shards),
        degrees=degrees.tolist(),
        labels=labels,
        features=features,
        reference_energies=energies,
        residual_std=deviation,
        total_charges=dict(sorted(totals.items())),
        taken_for_neutral=unknown,
    )


def joint_statistics(sources: Sequence[PreparedSource]) -> Statistics:
    """Return statistics of several data sets taken for one: what fits a model in which one head takes all of them.

    sources: training splits. Reference energies are fitted to all energies at once.
    """
    known = [source.manifest.statistics for source in sources]
    elements: Counter[int] = sum((Counter(one.elements) for one in known), Counter())
    totals: Counter[int] = sum((Counter(one.total_charges) for one in known), Counter())
    names = dict.fromkeys(name for one in known for name in one.labels)
    shards = [
        source.shard(number)
        for source in sources
        if "energy" in source.manifest.labels
        for number in range(len(source.manifest.shards))
    ]
    labels = {name: _join_statistics([one.labels[name] for one in known if name in one.labels]) for name in names}
    # As many columns everywhere: a model that reads several sources sees the same numbers of each.
    features = {
        name: [_join_statistics(list(parts)) for parts in zip(*(one.features[name] for one in known), strict=True)]
        for name in known[0].features
    }
    present = np.array(sorted(set().union(*(one.reference_energies for one in known))), dtype=np.int64)
    energies, deviation = fit_reference_energies(shards, present) if len(present) else ({}, None)
    return Statistics(
        elements=dict(sorted(elements.items())),
        largest_atoms=max(one.largest_atoms for one in known),
        largest_edges=max(one.largest_edges for one in known),
        degrees=[sum(counts) for counts in zip_longest(*(one.degrees for one in known), fillvalue=0)],
        labels=labels,
        features=features,
        reference_energies=energies,
        residual_std=deviation,
        total_charges=dict(sorted(totals.items())),
        taken_for_neutral=sum(one.taken_for_neutral for one in known),
    )


def _join_statistics(parts: Sequence[LabelStatistics]) -> LabelStatistics:
    """Return statistics of all numbers of several data sets."""
    numbers = sum(part.numbers for part in parts)
    mean = sum(part.numbers * part.mean for part in parts) / max(numbers, 1)
    # The variance of all numbers: that within the parts, and that of their means.
    squares = sum(part.numbers * (part.std**2 + (part.mean - mean) ** 2) for part in parts)
    largest = max(part.largest for part in parts)
    return LabelStatistics(numbers=numbers, mean=mean, std=(squares / max(numbers, 1)) ** 0.5, largest=largest)


def _label_statistics(
    shards: Sequence[Arrays],
    name: str,
    rows_of: Callable[[Arrays], npt.NDArray[np.int64]],
    column: int | None = None,
) -> LabelStatistics:
    """Return statistics of one label, in two passes: a variance from sums of squares drowns in large means.

    rows_of: gives the rows of a shard's training structures, atoms or edges.
    """

    def parts() -> Iterator[FloatArray]:
        for shard in shards:
            values = shard[name][rows_of(shard)].astype(np.float64)
            values = values if column is None else values[:, column]
            yield values[~np.isnan(values)]

    numbers = sum(len(part) for part in parts())
    if numbers == 0:
        return LabelStatistics(numbers=0, mean=0.0, std=0.0, largest=0.0)
    # Each pass reads all shards again: they need not fit into memory together.
    mean = sum(float(part.sum()) for part in parts()) / numbers
    variance = sum(float(((part - mean) ** 2).sum()) for part in parts()) / numbers
    largest = max(float(np.abs(part).max(initial=0.0)) for part in parts())
    return LabelStatistics(numbers=numbers, mean=mean, std=variance**0.5, largest=largest)


def fit_reference_energies(
    shards: Sequence[Arrays], present: npt.NDArray[np.int64]
) -> tuple[dict[int, float], float | None]:
    """Fit the energies of elements whose sums come closest to the energies of structures, by least squares.

    shards: with a `split`. present: atomic numbers. Returns energies by atomic number (eV) and the standard deviation of
    what is left over (eV an atom), a good `energy_scale`; nothing where no structure has an energy. Where compositions do
    not tell elements apart, the shortest solution about the mean energy of an atom is taken.
    """
    size = len(present)
    # Normal equations, a few elements squared: shards are read one by one and never held together.
    normal, right = np.zeros((size, size)), np.zeros(size)
    # An energy per atom taken off first leaves numbers small enough for the squares to keep their digits.
    shift = None
    for counts, energies in _training_energies(shards, present):
        shift = energies.sum() / counts.sum() if shift is None and len(energies) else shift
        if shift is not None:
            normal += counts.T @ counts
            right += counts.T @ (energies - shift * counts.sum(axis=1))
    if shift is None:
        return {}, None
    solution = np.linalg.lstsq(normal, right, rcond=1e-12)[0] + shift
    squares, largest, structures = 0.0, 0.0, 0
    for counts, energies in _training_energies(shards, present):
        size = counts.sum(axis=1)
        squares += float((((energies - counts @ solution) / size) ** 2).sum())
        largest = max(largest, float(np.abs(energies / size).max(initial=0.0)))
        structures += len(energies)
    deviation = float(np.sqrt(squares / structures))
    pairs = zip(present.tolist(), solution.tolist(), strict=True)
    # Fewer compositions than elements are met exactly: rounding is left, which is no scale of anything.
    return dict(pairs), deviation if deviation > _ROUNDING * largest else 0.0


def _training_energies(
    shards: Sequence[Arrays], present: npt.NDArray[np.int64]
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield for each shard: atoms of each present element [G, n], and energies [G], of training structures that have one."""
    place = np.zeros(ELEMENTS + 1, dtype=np.int64)
    place[present] = np.arange(len(present))
    for shard in shards:
        graph, species = _training_composition(shard)
        rows = _training_rows(shard)
        # One count for all structures: a table of structures by elements, row after row.
        flat = np.bincount(graph * len(present) + place[species], minlength=len(rows) * len(present))
        counts = flat.reshape(len(rows), len(present)).astype(np.float64)
        energies = shard["energy"][rows]
        known = ~np.isnan(energies)
        yield counts[known], energies[known]


def _training_composition(shard: Arrays) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return for each training atom: which training structure of the shard it belongs to, and its element."""
    counts = np.diff(shard["node_starts"])[_training_rows(shard)]
    return np.repeat(np.arange(len(counts)), counts), shard["species"][_training_atoms(shard)]


def _training_rows(shard: Arrays) -> npt.NDArray[np.int64]:
    return np.flatnonzero(shard["split"] == _TRAIN)


def _training_atoms(shard: Arrays) -> npt.NDArray[np.int64]:
    return _training_ranges(shard, "node_starts")


def _training_edges(shard: Arrays) -> npt.NDArray[np.int64]:
    return _training_ranges(shard, "edge_starts")


def _training_ranges(shard: Arrays, name: str) -> npt.NDArray[np.int64]:
    rows, starts = _training_rows(shard), shard[name]
    return ragged_ranges(starts[rows], starts[rows + 1] - starts[rows])


_FEATURE_ROWS = {
    "node_features": _training_atoms,
    "edge_features": _training_edges,
    "graph_features": _training_rows,
}
"""What gives the training rows of each kind of feature."""


def _pad_counts(values: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    return np.pad(values, (0, max(0, length - len(values))))
