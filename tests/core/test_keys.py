import math

import numpy as np
import pytest
import torch
from scipy import stats

from polyfed.core import keys


def test_parts_and_their_order_make_the_key() -> None:
    made = {keys.key(*parts) for parts in [(1, "a"), ("a", 1), ("1", "a"), (1, "a", 0), (11, "a"), (1, 1, "a")]}
    assert len(made) == 6


def test_tensor_and_integer_keys_give_the_same_numbers() -> None:
    base = keys.key(3, "x")
    assert torch.equal(keys.bits(base, 50), keys.bits(torch.tensor(base, dtype=torch.int32), 50))
    for number in (0, 1, 12345, 2**31 - 1):
        assert keys.fold_in(base, number) == int(keys.fold_in(torch.tensor(base, dtype=torch.int32), number))


def test_vmap_gives_each_client_what_it_would_get_alone() -> None:
    many = torch.tensor([keys.key("client", k) for k in range(5)], dtype=torch.int32)
    orders = torch.func.vmap(lambda key: keys.permutation(key, 33))(many)
    normals = torch.func.vmap(lambda key: keys.normal(key, (4, 3)))(many)
    for k, key in enumerate(many.tolist()):
        assert torch.equal(orders[k], keys.permutation(key, 33))
        assert torch.equal(normals[k], keys.normal(key, (4, 3)))


def test_a_stream_is_a_prefix_of_a_longer_one() -> None:
    assert torch.equal(keys.bits(7, 10), keys.bits(7, 1000)[:10])


@pytest.mark.parametrize("base", [0, 1, 2, keys.key("a", 1)])
def test_uniform_and_normal_have_their_distributions(base: int) -> None:
    assert stats.kstest(keys.uniform(base, 20000).numpy(), "uniform").pvalue > 1e-4
    assert stats.kstest(keys.normal(base, 20000).numpy(), "norm").pvalue > 1e-4


def test_neighbouring_keys_and_positions_are_uncorrelated() -> None:
    block = torch.stack([keys.uniform(keys.fold_in(5, k), 400) for k in range(200)]).double()
    centred = (block - block.mean()) / block.std()
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs(float((a * b).mean())) < 4 / math.sqrt(a.numel())


def test_every_order_of_four_is_equally_likely() -> None:
    seen = np.zeros((4, 4))
    for k in range(4000):
        for place, item in enumerate(keys.permutation(keys.fold_in(9, k), 4).tolist()):
            seen[place, item] += 1
    assert stats.chisquare(seen.ravel()).pvalue > 1e-4


def test_choice_is_uniform_distinct_and_cheap_for_huge_populations() -> None:
    drawn = [keys.choice(keys.fold_in(1, k), 10, 3) for k in range(5000)]  # type: ignore[arg-type]
    assert all(len(set(c)) == 3 and c == sorted(c) for c in drawn)
    assert stats.chisquare(np.bincount(np.concatenate(drawn), minlength=10)).pvalue > 1e-4
    assert len(set(keys.choice(1, 10**12, 50))) == 50
    assert keys.choice(4, 7, 7) == list(range(7))


def test_keys_of_many_clients_and_numbers_are_derived_at_once() -> None:
    bases, numbers = np.array([3, 2**31 - 1, 7], dtype=np.uint32), np.array([[0, 1], [5, 2**31 - 1], [9, 9]])
    found = keys.fold_in_all(bases[:, None], numbers)
    expected = [[keys.fold_in(int(base), int(n)) for n in row] for base, row in zip(bases, numbers, strict=True)]
    assert found.tolist() == expected
    assert keys.fold_in_all(bases, 5).tolist() == [keys.fold_in(int(base), 5) for base in bases]


def test_choice_keeps_its_draws() -> None:
    """Runs of earlier versions drew these cohorts, and a resumed run must draw them again."""
    assert keys.choice(7, 100, 5) == [3, 29, 66, 78, 99]
    assert keys.choice(keys.key("cohort", 3), 10**12, 3) == [18271194101, 145230043979, 983066418694]
