"""Submodular selection: greedy choices compared with brute force and with each other, and updates of distances."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from polyfed.selection.submodular import (
    Cover,
    Similarity,
    cost,
    greedy,
    lazy_greedy,
    sample,
    sketched,
    stochastic_greedy,
)


def cloud(num: int, size: int = 5, seed: int = 0) -> dict[int, torch.Tensor]:
    points = np.random.default_rng(seed).normal(size=(num, size)).astype(np.float32)
    return {client: torch.from_numpy(point) for client, point in enumerate(points)}


def similarity(vectors: dict[int, torch.Tensor], num: int | None = None) -> Similarity:
    size = len(next(iter(vectors.values())))
    return Similarity.empty(num or len(vectors), size).refreshed(vectors)


def test_distances_equal_scipy_and_are_symmetric_with_a_zero_diagonal() -> None:
    points = cloud(9)
    found = similarity(points).distance.numpy()
    wanted = cdist(np.stack([v.numpy() for v in points.values()]), np.stack([v.numpy() for v in points.values()]))
    assert np.allclose(found, wanted, atol=1e-5)
    assert np.array_equal(found, found.T)
    assert not found.diagonal().any()


def test_equal_vectors_are_at_distance_zero_exactly() -> None:
    same = {client: torch.full((1000,), 0.1234567) for client in range(4)}
    assert not similarity(same).distance.any()


@pytest.mark.parametrize("seed", range(5))
def test_utility_is_monotone_and_submodular_and_greedy_reaches_its_bound(seed: int) -> None:
    case = similarity(cloud(8, seed=seed))
    constant = 2 * float(case.distance.sum(0).max())
    subsets = [s for k in range(9) for s in itertools.combinations(range(8), k)]
    value = {s: constant - cost(case, s) if s else 0.0 for s in subsets}
    for smaller in subsets:
        for larger in (s for s in subsets if set(smaller) <= set(s)):
            assert value[larger] >= value[smaller] - 1e-4
            for client in set(range(8)) - set(larger):
                gain_small = value[tuple(sorted({*smaller, client}))] - value[smaller]
                gain_large = value[tuple(sorted({*larger, client}))] - value[larger]
                assert gain_small >= gain_large - 1e-4
    for size in (1, 2, 3, 4):
        best = max(value[s] for s in subsets if len(s) == size)
        assert value[tuple(sorted(greedy(case, size, range(8))))] >= (1 - 1 / math.e) * best


@pytest.mark.parametrize("seed", range(10))
def test_lazy_and_stochastic_with_all_candidates_equal_full_greedy(seed: int) -> None:
    case = similarity(cloud(30, seed=seed))
    full = greedy(case, 12, range(30))
    assert lazy_greedy(case, 12, range(30)) == full
    assert stochastic_greedy(case, 12, range(30), of=30, key=seed) == full


def test_ties_go_to_the_smallest_number() -> None:
    case = similarity({client: torch.zeros(3) for client in range(5)})
    assert greedy(case, 3, range(5)) == lazy_greedy(case, 3, range(5)) == [0, 1, 2]


def test_two_far_clusters_give_one_member_each_and_all_are_chosen_when_asked_for() -> None:
    points = {c: torch.tensor([100.0 * (c >= 4), 0.1 * c]) for c in range(8)}
    case = similarity(points)
    for choose in (greedy, lazy_greedy):
        low, high = sorted(choose(case, 2, range(8)))
        assert low < 4 <= high
        assert sorted(choose(case, 8, range(8))) == list(range(8))
        assert sorted(choose(case, 20, range(8))) == list(range(8))


def test_stochastic_draws_depend_on_the_key_alone() -> None:
    case = similarity(cloud(40))
    first, again, other = (stochastic_greedy(case, 5, range(40), of=6, key=key) for key in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 5
    assert sample(range(10), 20, 1) == list(range(10))


def test_only_rows_and_columns_of_the_refreshed_change() -> None:
    before = similarity(cloud(10))
    after = before.refreshed({c: v + 1.0 * c for c, v in cloud(10, seed=1).items() if c in (2, 7)})
    changed = (before.distance != after.distance).numpy()
    untouched = [c for c in range(10) if c not in (2, 7)]
    assert not changed[np.ix_(untouched, untouched)].any()
    assert changed[2, untouched].all()
    assert torch.equal(after.distance, after.distance.T)
    assert not after.distance.diagonal().any()
    assert torch.equal(before.distance, similarity(cloud(10)).distance), "the old one is left alone"


def test_clients_without_a_vector_neither_represent_others_nor_count() -> None:
    points = cloud(6)
    known = {c: v for c, v in points.items() if c not in (0, 3)}
    case = similarity(known, num=6)
    assert torch.isinf(case.distance[0, 1:]).all()
    assert case.distance[0, 0] == 0
    chosen = greedy(case, 4, range(6))
    assert set(chosen) == {1, 2, 4, 5}
    compact = similarity({i: v for i, v in enumerate(known.values())})
    assert chosen == [[1, 2, 4, 5][i] for i in greedy(compact, 4, range(4))]
    assert Cover(case.distance, case.known).best([0, 3]) is None
    assert lazy_greedy(case, 6, range(6))[:4] == chosen


def test_sketch_keeps_distances_within_its_error() -> None:
    points = torch.stack(list(cloud(12, size=5000, seed=3).values()))
    exact, rough = torch.cdist(points, points), torch.cdist(*[sketched(points, 2000, key=5)] * 2)
    off = ~torch.eye(12, dtype=torch.bool)
    # the relative error of a squared distance has deviation sqrt(2 / 2000) = 3 %
    assert ((rough - exact).abs()[off] / exact[off]).max() < 0.1
    assert torch.equal(sketched(points, 2000, key=5), sketched(points, 2000, key=5))


def test_a_sketch_longer_than_the_vector_is_not_made() -> None:
    assert Similarity.empty(3, 10, sketch=100).vectors.shape == (3, 10)
    assert Similarity.empty(3, 1000, sketch=100).vectors.shape == (3, 100)
