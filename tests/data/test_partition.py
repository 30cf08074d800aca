"""Partitions: disjoint, complete, deterministic, and with the sizes and label skew that each promises."""

from dataclasses import dataclass, replace
from math import comb

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data import ClientsSpec, Shards, populate
from polyfed.data.partitions import PARTITIONS, Partition
from polyfed.data.partitions.by_client import natural_clients
from refusals import refuses, warned

ALL = [
    ("iid", {"num": 7}),
    ("dirichlet", {"num": 7, "alpha": 0.5, "min_size": 5}),
    ("dirichlet-authors", {"num": 7, "alpha": 0.5}),
    ("by-client", {}),
    ("by-client", {"shards": 3, "alpha": 0.5, "min_size": 4}),
    ("classes-per-client", {"num": 7, "classes_per_client": 3}),
    ("main-class", {"num": 7, "main_share": 0.3}),
    ("silos", {"silos": 4}),
]
EXHAUSTIVE = [case for case in ALL if case[0] != "main-class"]


def split_rows(columns, name, options, key=1):
    return PARTITIONS[name](**options).split(columns, columns.rows(0).numpy(), key)


def histograms(columns, parts):
    label = columns.label.numpy()
    return np.stack([np.bincount(label[part], minlength=columns.num_classes) for part in parts])


@pytest.mark.parametrize(("name", "options"), ALL)
def test_clients_are_disjoint_and_hold_only_the_given_rows(table, name, options):
    columns = table()
    used = np.concatenate(split_rows(columns, name, options))
    assert len(np.unique(used)) == len(used)
    assert np.isin(used, columns.rows(0).numpy()).all()


@pytest.mark.parametrize(("name", "options"), EXHAUSTIVE)
def test_every_row_is_dealt(table, name, options):
    columns = table()
    used = np.sort(np.concatenate(split_rows(columns, name, options)))
    np.testing.assert_array_equal(used, columns.rows(0).numpy())


@pytest.mark.parametrize(("name", "options"), ALL)
def test_one_key_gives_one_partition(table, name, options):
    columns = table()
    first, again = (split_rows(columns, name, options) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "options"), [case for case in ALL if case != ("by-client", {})])
def test_another_key_gives_another_partition(table, name, options):
    columns = table()
    first, other = (split_rows(columns, name, options, key) for key in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_every_partition_takes_its_options_from_the_clients_section():
    names = {"num", "alpha", "min_size", "shards", "classes_per_client", "main_share", "exclude_main"}
    for name, cls in PARTITIONS.items():
        spec = ClientsSpec(partition=name, num=None if name in ("by-client", "silos") else 3)
        assert type(spec.build_partition()) is cls
        assert set(cls.__dataclass_fields__) <= names | {"on_shortage", "silos"}


def test_iid_sizes_differ_by_at_most_one(table):
    sizes = [len(part) for part in split_rows(table(), "iid", {"num": 7})]
    assert max(sizes) - min(sizes) == 1
    assert sum(sizes) == 500


def test_a_huge_alpha_is_near_uniform(table):
    columns = table(rows=12000)
    counts = histograms(columns, split_rows(columns, "dirichlet", {"num": 10, "alpha": 1e8}))
    expected = counts.sum(0) / 10
    assert np.abs(counts / expected - 1).max() < 0.03


def test_a_tiny_alpha_leaves_few_classes_to_a_client(table):
    columns = table(rows=12000, classes=10)
    counts = histograms(columns, split_rows(columns, "dirichlet", {"num": 10, "alpha": 0.05}))
    share = counts / counts.sum(1, keepdims=True)
    assert (share > 0.05).sum(1).mean() < 3.5


@pytest.mark.parametrize("min_size", [1, 20, 60])
def test_dirichlet_keeps_its_least_size(table, min_size):
    parts = split_rows(table(), "dirichlet", {"num": 6, "alpha": 0.5, "min_size": min_size})
    assert min(len(part) for part in parts) >= min_size


def test_dirichlet_that_cannot_reach_its_least_size_says_what_to_change(table):
    with refuses(RecipeError, "clients.min_size: 1000 draws"):
        split_rows(table(), "dirichlet", {"num": 5, "alpha": 0.01, "min_size": 99})


@pytest.mark.parametrize("name", ["iid", "dirichlet", "dirichlet-authors", "main-class"])
def test_more_clients_than_rows_is_refused(table, name):
    options = {"num": 501} | ({"alpha": 1.0} if "dirichlet" in name else {})
    with refuses(RecipeError, "clients.num: fewer clients"):
        split_rows(table(), name, options)


def test_natural_clients_are_the_rows_of_each(table):
    columns = table()
    parts = natural_clients(columns, columns.rows(0).numpy())
    client, train = columns.client.numpy(), columns.split.numpy() == 0
    assert len(parts) == 6
    for number, part in enumerate(parts):
        np.testing.assert_array_equal(part, np.flatnonzero((client == number) & train))


def test_shards_of_a_natural_client_are_cut_from_it_alone(table):
    columns = table()
    parts = split_rows(columns, "by-client", {"shards": 3, "alpha": 0.5, "min_size": 4})
    assert len(parts) == 18
    assert min(len(part) for part in parts) >= 4
    for place, part in enumerate(parts):
        assert (columns.client[part] == place // 3).all()


def test_a_natural_client_too_small_to_be_cut_is_named(table):
    with refuses(RecipeError, "clients.shards: natural client 0"):
        split_rows(table(), "by-client", {"shards": 9, "min_size": 10})


def test_by_client_without_natural_clients_says_so(table):
    with refuses(RecipeError, "clients.partition: no natural clients"):
        split_rows(table(client=None), "by-client", {})


@pytest.mark.parametrize("num", [5, 10, 25])
def test_each_client_owns_its_classes_and_owners_share_evenly(table, num):
    columns = table(rows=3000)
    counts = histograms(columns, split_rows(columns, "classes-per-client", {"num": num, "classes_per_client": 3}))
    assert ((counts > 0).sum(1) == 3).all()
    for per_class in counts.T:
        owners = per_class[per_class > 0]
        assert len(owners) >= 1
        assert owners.max() - owners.min() <= 1
    sets = {tuple(line) for line in (counts > 0).tolist()}
    assert len(sets) == min(num, comb(5, 3))


def test_sets_of_classes_overlap_at_random_in_two_one_and_no_class(table):
    columns = table(rows=6000, classes=6)
    owned = histograms(columns, split_rows(columns, "classes-per-client", {"num": 20})) > 0
    common = owned.astype(int) @ owned.T.astype(int)
    assert set(common[np.triu_indices(20, 1)]) == {0, 1, 2}


def test_too_few_clients_to_own_all_classes_is_refused(table):
    with refuses(RecipeError, "clients.classes_per_client: all 5 classes"):
        split_rows(table(), "classes-per-client", {"num": 1, "classes_per_client": 3})
    with refuses(RecipeError, "clients.classes_per_client: hold 5 classes"):
        split_rows(table(), "classes-per-client", {"num": 9, "classes_per_client": 6})


def test_a_class_rarer_than_its_owners_is_refused(table):
    label = torch.arange(600) % 2
    label[0] = 2
    with refuses(DataError, "rarest has 1"):
        split_rows(table(label=label), "classes-per-client", {"num": 30, "classes_per_client": 3})


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_main_class_sizes_are_equal_and_the_share_is_reached(table, share):
    columns = table(rows=6000)
    counts = histograms(columns, split_rows(columns, "main-class", {"num": 10, "main_share": share}))
    size = counts[0].sum()
    assert (counts.sum(1) == size).all()
    main = counts[np.arange(10), np.arange(10) % 5]
    assert (main >= int(share * size)).all()
    # the rest comes from all classes, so the real share lies above, by about (1 - f) / C
    assert main.mean() / size == pytest.approx(share + (1 - share) / 5, abs=0.05)


def test_excluding_the_main_class_makes_its_share_exact(table):
    columns = table(rows=6000)
    options = {"num": 10, "main_share": 0.3, "exclude_main": True, "on_shortage": "reduce"}
    counts = histograms(columns, split_rows(columns, "main-class", options))
    main = counts[np.arange(10), np.arange(10) % 5]
    assert (main == int(0.3 * counts[0].sum())).all()
    assert len(set(counts.sum(1))) == 1
    assert counts[0].sum() >= 0.85 * 500


def rare_class(table):
    label = torch.arange(600) % 4
    label[torch.arange(40) * 12] = 4  # 40 rows, all of them training rows
    return table(label=label)


def test_a_rare_main_class_makes_all_clients_smaller(table):
    columns = rare_class(table)
    counts = histograms(columns, split_rows(columns, "main-class", {"num": 5, "main_share": 0.5}))
    assert (counts.sum(1) == 80).all()
    assert counts[4, 4] == 40


def test_a_rare_main_class_may_be_capped_with_a_warning(table):
    columns = rare_class(table)
    with warned("smaller share", UserWarning):
        counts = histograms(columns, split_rows(columns, "main-class", {"num": 5, "on_shortage": "cap"}))
    assert (counts.sum(1) == 100).all()
    assert counts[4, 4] == 40


def test_shards_give_back_what_they_were_made_of():
    parts = [np.array([4, 2]), np.array([], dtype=np.int64), np.array([7])]
    shards = Shards.of(parts)
    assert [own.tolist() for own in (shards[0], shards[1], shards[2])] == [[4, 2], [], [7]]
    assert shards.sizes.tolist() == [2, 0, 1]
    assert shards.owner.tolist() == [0, 0, 2]
    assert [own.tolist() for own in map(shards.repeated(2).__getitem__, range(6))] == [
        [4, 2],
        [4, 2],
        [],
        [],
        [7],
        [7],
    ]
    with pytest.raises(IndexError):
        shards[3]
    index, counts = shards.padded([2, 0, 1])
    assert (index.tolist(), counts) == ([[7, 7], [4, 2], [0, 0]], (1, 2, 0))
    assert shards.padded([1])[0].shape == (1, 0)


def test_holding_out_takes_the_floor_of_the_share_of_every_client():
    shards = Shards.of([np.arange(100), np.arange(100, 103), np.arange(200, 210)])
    stay, off = shards.held_out(0.29, 5)
    assert off.sizes.tolist() == [29, 0, 2]
    for client in range(3):
        assert sorted([*stay[client].tolist(), *off[client].tolist()]) == shards[client].tolist()


# silos


def silo_rows(columns, **options):
    population = populate(columns, ClientsSpec(partition="silos", **options), 1)
    return population, [set(population.train[k].tolist()) for k in range(population.num_clients)]


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ({"silos": 3, "silo_partition": "dirichlet", "alpha": 0.3, "min_size": 5}, 3),
        ({"silo_partition": "dirichlet", "alpha": 5.0}, 4),
        ({"silo_partition": "by-client"}, None),
        ({"silos": 5, "silo_partition": "classes-per-client"}, 5),
        ({"silo_sizes": [4, 1, 1]}, 3),
        ({"silos": 3, "silo_partition": "data.test_partition:Pieces"}, 3),
    ],
    ids=["dirichlet", "four-by-default", "natural", "classes", "sizes", "own"],
)
def test_silos_follow_any_partition_and_their_devices_share_rows(table, options, num):
    columns = table()
    population, rows = silo_rows(columns, **options)
    silos = population.silo.tolist()
    assert len(set(silos)) == (len(columns.client[columns.rows(0)].unique()) if num is None else num)
    for k in range(0, len(rows), 2):
        assert silos[k] == silos[k + 1]
        assert rows[k] == rows[k + 1]
        assert not any(rows[k] & rows[j] for j in range(k))
    if options.get("silo_partition") == "by-client":
        natural = columns.client[population.train[2]]
        assert bool((natural == natural[0]).all())
    if "silo_sizes" in options:
        sizes = [len(rows[k]) for k in range(0, len(rows), 2)]
        assert sum(sizes) == len(columns.rows(0))
        assert sizes[0] == pytest.approx(4 * sizes[1], abs=3)


@dataclass(frozen=True, kw_only=True)
class Pieces(Partition):
    """A user's partition: contiguous pieces."""

    num: int

    def split(self, columns, rows, key):
        return np.array_split(rows, self.num)


def test_devices_of_a_silo_overlap_in_part_and_deal_the_rows_of_an_equal_entry(table):
    options = {"silos": 2, "silo_overlap": 0.4, "holdings": [["a"], ["b"], ["b"]]}
    population, rows = silo_rows(table(), **options)
    whole = [set(part.tolist()) for part in populate(table(), ClientsSpec(partition="silos", silos=2), 1).train]
    for silo in range(2):
        a, b, more = rows[3 * silo : 3 * silo + 3]
        total = len(whole[2 * silo])
        assert a | b | more == whole[2 * silo]
        assert not b & more
        assert abs(len(b) - len(more)) <= 1
        assert len(a & (b | more)) == int(0.4 * total)
    assert population.holds.tolist() == [[True, False], [False, True], [False, True]] * 2


def test_a_natural_silo_without_a_modality_has_no_device_for_it(table):
    columns = table()
    lacks = columns.client == columns.client[0]
    population, _ = silo_rows(replace(columns, present={"b": ~lacks}), silo_partition="by-client")
    number = int(columns.client[0])
    devices = (population.silo == population.silo.unique()[number]).nonzero().flatten().tolist()
    assert [population.modalities(k) for k in devices] == [("a",)]
    assert len(population.train) == len(population.silo) == len(population.holds)
    with refuses(DataError, "has no modality"):  # a silo that lacks both is refused, not left out
        silo_rows(replace(columns, present={"a": ~lacks, "b": ~lacks}), silo_partition="by-client")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "iid", "silo_partition": "dirichlet"}, "clients.silo_partition: clients.partition"),
        ({"partition": "iid", "silo_overlap": 0.5}, "clients.silo_overlap: clients.partition"),
        ({"silo_partition": "silos"}, "clients.silo_partition: must be"),
        ({"silo_partition": "dirichlat"}, "clients.partition: dirichlet"),
        ({"silo_partition": "by-client", "silos": 3}, "clients.silos: silos itself"),
        ({"silo_sizes": [1, 0]}, "clients.silo_sizes: number above 0"),
        ({"silo_sizes": []}, "clients.silo_sizes: number above 0"),
        ({"silo_sizes": [1, 2], "silos": 3}, "clients.silos: silo_sizes"),
        ({"silo_sizes": [1, 2], "silo_partition": "dirichlet"}, "clients.silo_sizes: silo_partition"),
        ({"silo_overlap": 0.0}, "clients.silo_overlap: must be"),
    ],
)
def test_silos_that_contradict_each_other_are_refused(options, words):
    with refuses(RecipeError, words):
        ClientsSpec(**({"partition": "silos"} | options))
