import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.counter_random import stable_key
from phalanx.data.sample_order import EpochShuffle, Mixture, MixtureSchedule, whole_weights

FAR = 10**15
weight_lists = st.lists(st.integers(1, 60), min_size=1, max_size=9)


def numbers(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int64)


@settings(max_examples=150, deadline=None)
@given(items=st.integers(1, 3000), key=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**9))
@example(items=1, key=0, epoch=0)
@example(items=2, key=2**64 - 1, epoch=10**9)
@example(items=48 * 49 + 1, key=5, epoch=1)  # one item more than a rectangle holds
def test_every_epoch_holds_every_item_once(items: int, key: int, epoch: int) -> None:
    order = EpochShuffle(items, key)(numbers(epoch * items, (epoch + 1) * items))
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(items))


def test_epochs_and_keys_give_different_orders() -> None:
    items = 1000
    orders = [EpochShuffle(items, key)(numbers(0, 8 * items)).reshape(8, items) for key in range(4)]
    rows = np.concatenate(orders)
    for i in range(len(rows)):
        for j in range(i):
            # Two independent permutations agree in one place on average; ten or more has a chance of 1e-7.
            assert (rows[i] == rows[j]).sum() < 10, (i, j)


def test_the_order_looks_random() -> None:
    items, epochs = 64, 6000
    places = EpochShuffle(items, 7)(numbers(0, items * epochs)).reshape(epochs, items)
    counts = np.zeros((items, items))
    for place in range(items):
        counts[place] = np.bincount(places[:, place], minlength=items)
    expected = epochs / items
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = (items - 1) ** 2
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)
    neighbours = np.abs(np.diff(places, axis=1)).mean()
    assert neighbours == pytest.approx((items + 1) / 3, rel=0.02)


@settings(max_examples=50, deadline=None)
@given(items=st.integers(1, 10**12), places=st.lists(st.integers(0, FAR), min_size=1, max_size=20, unique=True))
def test_any_place_is_read_on_its_own(items: int, places: list[int]) -> None:
    shuffle = EpochShuffle(items, 11)
    together = shuffle(np.array(places, dtype=np.int64))
    assert together.tolist() == [int(shuffle(np.array([place], dtype=np.int64))[0]) for place in places]
    assert (together >= 0).all() and (together < items).all()


def test_a_far_epoch_is_a_permutation_too() -> None:
    items = 997
    epoch = FAR // items
    order = EpochShuffle(items, 3)(numbers(epoch * items, (epoch + 1) * items))
    assert np.array_equal(np.sort(order), np.arange(items))


def test_a_huge_epoch_repeats_no_item() -> None:
    read = EpochShuffle(2**61, 3)(np.concatenate([numbers(0, 50_000), numbers(FAR, FAR + 50_000)]))
    assert len(np.unique(read)) == 100_000


def test_the_order_of_a_seed_stays_what_it_was() -> None:
    # Existing runs resume into this order: a change must raise ORDER_VERSION.
    assert stable_key("samples", 17, 0) == 5243380423662785159
    assert EpochShuffle(10, 1)(numbers(0, 20)).tolist() == [7, 6, 9, 1, 3, 4, 0, 2, 8, 5, 2, 3, 5, 9, 1, 4, 6, 8, 0, 7]
    assert Mixture([3, 1, 2])(numbers(0, 6))[0].tolist() == [2, 0, 2, 0, 1, 0]


@settings(max_examples=100, deadline=None)
@given(weights=weight_lists, period=st.integers(0, 10**9))
def test_a_period_honours_the_weights_exactly(weights: list[int], period: int) -> None:
    mixture = Mixture(weights)
    whole = whole_weights(weights)
    assert mixture.period == sum(whole)
    first = period * mixture.period
    source, place = mixture(numbers(first, first + mixture.period))
    assert np.bincount(source, minlength=len(weights)).tolist() == whole
    for index, weight in enumerate(whole):
        assert place[source == index].tolist() == list(range(period * weight, (period + 1) * weight))


@settings(max_examples=100, deadline=None)
@given(weights=weight_lists, samples=st.integers(0, 2000))
def test_counts_agree_with_dealing_out(weights: list[int], samples: int) -> None:
    mixture = Mixture(weights)
    source, place = mixture(numbers(0, samples))
    counts = mixture.counts(samples)
    assert counts == np.bincount(source, minlength=len(weights)).tolist()
    for index, count in enumerate(counts):
        assert place[source == index].tolist() == list(range(count))


@settings(max_examples=100, deadline=None)
@given(weights=weight_lists, samples=st.integers(0, FAR))
def test_no_source_is_ever_far_from_its_share(weights: list[int], samples: int) -> None:
    mixture = Mixture(weights)
    depth = int(np.ceil(np.log2(len(weights)))) if len(weights) > 1 else 0
    counts = mixture.counts(samples)
    assert sum(counts) == samples
    for weight, count in zip(mixture.weights, counts, strict=True):
        assert abs(count * mixture.period - samples * weight) <= depth * mixture.period


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(1e-12, 1e12, allow_nan=False), min_size=1, max_size=8), first=st.integers(0, FAR))
@example(weights=[1e-9, 1e9], first=FAR)
@example(weights=[1e300, 1e-300, 1.0], first=FAR)
@example(weights=[5e-324, 1.0], first=0)
@example(weights=[0.1, 0.2, 0.7], first=FAR)
def test_extreme_weights_are_dealt_out_consistently(weights: list[float], first: int) -> None:
    mixture = Mixture(weights)
    assert min(mixture.weights) >= 1
    assert mixture.period <= 2**31
    source, place = mixture(numbers(first, first + 500))
    before, after = mixture.counts(first), mixture.counts(first + 500)
    for index in range(len(weights)):
        assert place[source == index].tolist() == list(range(before[index], after[index]))


def test_many_sources_with_extreme_weights() -> None:
    weights = [10.0 ** (i % 20 - 10) for i in range(300)]
    mixture = Mixture(weights)
    counts = np.array(mixture.counts(10**12))
    shares = np.array(weights) / sum(weights)
    assert counts.sum() == 10**12
    assert np.abs(counts / 10**12 - shares).max() < 2e-9 * 300


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([1.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([2, 4, 6], [1, 2, 3]),
        ([1e-3, 1.0], [1, 1000]),
        ([0.5, 1.5], [1, 3]),
    ],
)
def test_weights_are_the_decimals_they_print_as(weights: list[float], whole: list[int]) -> None:
    assert whole_weights(weights) == whole


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be positive finite numbers, found"):
        Mixture(weights)


def test_keys_tell_parts_apart() -> None:
    assert stable_key("samples", 1, 23) == stable_key("samples", 1, 23)
    assert len({stable_key("samples", 1, 23), stable_key("samples", 12, 3), stable_key("samples", "123")}) == 3
    assert 0 <= stable_key("x") < 2**64


PHASES = [(0, (3.0, 1.0, 0.0)), (37, (1.0, 1.0, 2.0)), (37, (0.0, 1.0, 1.0)), (100, (0.0, 0.0, 5.0))]


def test_a_mixture_that_changes_reads_every_source_on_from_where_it_was_left() -> None:
    mixture = MixtureSchedule(PHASES)
    source, place = mixture(numbers(0, 160))
    for index in range(3):
        assert place[source == index].tolist() == list(range((source == index).sum()))
    shares = [np.bincount(source[first:last], minlength=3) for first, last in ((0, 36), (37, 99), (100, 160))]
    # Over whole periods the weights hold exactly; no numbers are drawn by a phase without any.
    assert shares[0].tolist() == [27, 9, 0] and shares[2].tolist() == [0, 0, 60]
    assert shares[1].tolist() == [0, 31, 31]


def test_a_mixture_that_changes_costs_the_same_far_along_and_one_number_at_a_time() -> None:
    phases = [(0, (0.5, 0.5)), (10**14, (0.25, 0.75)), (10**15, (1.0, 0.0))]
    mixture = MixtureSchedule(phases)
    around = np.concatenate([np.arange(start - 3, start + 3) for start in (10**14, 10**15)])
    source, place = mixture(around)
    alone = [mixture(np.array([number])) for number in around]
    assert source.tolist() == [int(found[0][0]) for found in alone]
    assert place.tolist() == [int(found[1][0]) for found in alone]
    first = 10**14 // 2 + (10**15 - 10**14) // 4
    assert [p for s, p in zip(source, place, strict=True) if s == 0][-3:] == [first, first + 1, first + 2]


def test_a_mixture_without_changes_is_the_plain_one() -> None:
    plain, scheduled = Mixture([3, 1, 2]), MixtureSchedule([(0, [3.0, 1.0, 2.0])])
    for ours, theirs in zip(scheduled(numbers(0, 50)), plain(numbers(0, 50)), strict=True):
        assert np.array_equal(ours, theirs)
    assert scheduled.description == plain.weights
