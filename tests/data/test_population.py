"""From a table to clients: test and validation rows, held modalities, silos, and refused options."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, RecipeError
from polyfed.data import SOURCES, ClientsSpec, populate
from refusals import refuses, warned


def spec(**options):
    return ClientsSpec(**({"num": 7} | options))


def rows_of(shards):
    return [set(shards[k].tolist()) for k in range(len(shards))]


def test_training_test_and_validation_rows_never_meet(table):
    population = populate(table(), spec(validation=0.2, personal_test=0.25), 1)
    parts = [population.train.rows, population.test.rows, population.validation_rows, population.test_rows]
    together = torch.cat(parts)
    assert len(together) == len(together.unique()) == 600
    assert (population.columns.split[population.test_rows] == 1).all()


def test_validation_takes_its_share_of_every_client(table):
    whole = populate(table(), spec(partition="dirichlet"), 1)
    population = populate(table(), spec(partition="dirichlet", validation=0.2), 1)
    for kept, own in zip(rows_of(population.train), rows_of(whole.train), strict=True):
        assert kept < own
        assert len(own - kept) == len(own) // 5
    assert population.validation_rows.tolist() == sorted(
        set(whole.train.rows.tolist()) - set(population.train.rows.tolist())
    )


def test_personal_validation_stays_with_its_client(table):
    options = {"partition": "dirichlet", "personal_test": 0.25}
    population = populate(table(), spec(personal_validation=0.2, **options), 1)
    whole = populate(table(), spec(partition="dirichlet"), 1)
    assert len(population.validation_rows) == 0
    for own, rest, test, all_rows in zip(
        *(rows_of(part) for part in (population.own_validation, population.train, population.test, whole.train)),
        strict=True,
    ):
        assert own | rest | test == all_rows
        assert len(own) == len(all_rows) // 5
        assert not own & (rest | test)
    tuned = populate(table(), spec(personal_validation=0.2, measure_on="validation", **options), 1)
    assert rows_of(tuned.test) == rows_of(population.own_validation)
    assert set(tuned.test_rows.tolist()) == set(population.own_validation.rows.tolist())


def test_personal_validation_is_refused_beside_pooled_rows():
    with refuses(RecipeError, "clients.validation: personal_validation keeps"):
        spec(personal_validation=0.1, validation=0.1)


@pytest.mark.parametrize("overlap", [None, 0.5])
def test_the_devices_of_a_silo_share_its_validation_rows(table, overlap):
    options = {"partition": "silos", "num": None, "silos": 3, "personal_validation": 0.2, "silo_overlap": overlap}
    population = populate(table(), spec(**options), 1)
    own, train = population.own_validation, population.train
    assert not len(population.validation_rows)
    for silo in range(3):
        first, second = (set(own[k].tolist()) for k in (2 * silo, 2 * silo + 1))
        assert first & second, "rows in common"
        assert (first == second) == (overlap is None)
        assert not (first | second) & {row for k in (2 * silo, 2 * silo + 1) for row in train[k].tolist()}


def test_with_natural_clients_validation_is_taken_before_the_cut(table):
    options = {"partition": "by-client", "num": None, "shards": 3, "min_size": 4, "validation": 0.2}
    population = populate(table(), spec(**options), 1)
    client, train = population.columns.client, population.columns.split == 0
    for number in range(6):
        assert (client[population.validation_rows] == number).sum() == int(((client == number) & train).sum()) // 5
    assert population.num_clients == 18


def test_validation_rows_of_the_data_join_the_pool(table):
    split = (torch.arange(600) % 3).to(torch.int8)
    population = populate(table(split=split), spec(), 1)
    assert population.validation_rows.tolist() == list(range(2, 600, 3))


def test_marked_own_test_rows_go_to_their_client_and_guard_rows_to_no_client(table):
    marks = (torch.arange(600) % 4 % 3).to(torch.int8)
    columns = table(split_personal=marks)
    population = populate(columns, spec(partition="by-client", num=None, personal_test="split_personal"), 1)
    client, train = columns.client, columns.split == 0
    for k in range(6):
        for shards, mark in ((population.train, 0), (population.test, 1)):
            expected = (train & (client == k) & (marks == mark)).nonzero()[:, 0]
            assert sorted(shards[k].tolist()) == expected.tolist()


def test_marked_own_test_rows_work_with_validation_and_any_partition(table):
    marks = (torch.arange(600) % 4 % 3).to(torch.int8)
    columns = table(split_personal=marks)
    for options in ({}, {"partition": "by-client", "num": None, "shards": 2, "min_size": 2}):
        population = populate(columns, spec(personal_test="split_personal", validation=0.2, **options), 1)
        assert (marks[population.train.rows] == 0).all()
        assert (marks[population.test.rows] == 1).all()
        assert (marks[population.validation_rows] == 0).all()
        assert len(population.validation_rows) > 30


def test_without_marks_the_marked_own_test_is_refused(table):
    with refuses(RecipeError, "clients.personal_test: split_personal"):
        populate(table(), spec(personal_test="split_personal"), 1)


def test_matched_own_tests_have_the_label_proportions_of_the_client(table):
    columns = table(rows=6000)
    population = populate(columns, spec(partition="classes-per-client", personal_test="matched"), 1)
    label, test_rows = columns.label.numpy(), set(population.test_rows.tolist())
    for k in range(7):
        own = population.test[k].tolist()
        assert len(set(own)) == len(own)
        assert set(own) <= test_rows
        share = np.bincount(label[population.train[k]], minlength=5) / len(population.train[k])
        counts = np.bincount(label[own], minlength=5)
        np.testing.assert_allclose(counts, share * len(own), atol=1.0)
        assert len(own) == pytest.approx(len(population.train[k]) * 1000 / 5000, abs=1)


def test_matched_own_tests_shrink_where_a_class_is_rare_and_keep_one_row_of_each(table):
    columns = table(rows=6000)
    split = columns.split.clone()
    split[((split == 1) & (columns.label == 2)).nonzero()[3:, 0]] = 3
    population = populate(replace(columns, split=split), spec(num=2, personal_test="matched"), 1)
    for k in range(2):
        counts = torch.bincount(columns.label[population.test[k]], minlength=5)
        assert counts[2] in (1, 2, 3)
        assert counts.min() >= 1
        assert counts.max() <= 8


def test_without_a_global_test_set_the_own_tests_are_it(table):
    columns = table(split=torch.zeros(600, dtype=torch.int8))
    population = populate(columns, spec(personal_test=0.25), 1)
    assert population.test_rows.tolist() == sorted(population.test.rows.tolist())
    with refuses(RecipeError, "clients.personal_test: global test set"):
        populate(columns, spec(personal_test="matched"), 1)


def test_devices_of_a_silo_share_rows_and_hold_one_modality_each(table):
    options = {"partition": "silos", "num": None, "silos": 3, "validation": 0.1, "personal_test": 0.2}
    population = populate(table(), spec(**options), 1)
    assert population.silo.tolist() == [0, 0, 1, 1, 2, 2]
    assert population.holds.tolist() == [[True, False], [False, True]] * 3
    for shards in (population.train, population.test):
        rows = rows_of(shards)
        assert rows[0] == rows[1]
        assert rows[2] == rows[3]
        assert not rows[0] & rows[2]
    assert not set(population.validation_rows.tolist()) & set(population.train.rows.tolist())


def test_devices_of_a_silo_follow_the_given_holdings(table):
    population = populate(table(), spec(partition="silos", num=None, silos=2, holdings=[["a", "b"], ["b"], ["a"]]), 1)
    assert population.num_clients == 6
    assert [population.modalities(k) for k in range(3)] == [("a", "b"), ("b",), ("a",)]
    assert population.silo.tolist() == [0, 0, 0, 1, 1, 1]


def test_every_client_holds_everything_by_default(table):
    assert populate(table(), spec(), 1).holds.all()


@pytest.mark.parametrize(("num", "share"), [(20, 0.25), (20, 0.5), (7, 0.3)])
def test_missing_takes_the_exact_share_and_leaves_every_client_a_modality(table, num, share):
    holds = populate(table(), spec(num=num, missing={"a": share, "b": share}), 1).holds
    assert (~holds).sum(0).tolist() == [round(share * num)] * 2
    assert holds.any(1).all()


def test_missing_more_than_can_be_spared_is_refused(table):
    with refuses(RecipeError, "clients.missing.b: only 4"):
        populate(table(), spec(num=10, missing={"a": 0.6, "b": 0.6}), 1)


@pytest.mark.parametrize(("num", "p", "expected"), [(20, 0.3, (6, 7, 7)), (30, 0.2, (6, 12, 12)), (9, 0.5, (4, 2, 3))])
def test_keep_both_deals_the_rest_to_single_modalities(table, num, p, expected):
    holds = populate(table(), spec(num=num, keep_both=p), 1).holds.tolist()
    assert tuple(holds.count(kind) for kind in ([True, True], [True, False], [False, True])) == expected


def test_only_and_holdings_say_who_holds_what(table):
    only = populate(table(), spec(only={"a": [0, 6], "b": [2]}), 1)
    assert [only.modalities(k) for k in (0, 1, 2, 6)] == [("a",), ("a", "b"), ("b",), ("a",)]
    cycle = populate(table(), spec(holdings=[["b"], ["a", "b"]]), 1)
    assert cycle.holds[:, 0].tolist() == [False, True] * 3 + [False]


def test_the_assignment_is_fixed_by_the_key_and_leaves_the_partition_alone(table):
    first, again, other = (populate(table(), spec(num=20, missing={"a": 0.5}), key) for key in (1, 1, 2))
    assert torch.equal(first.holds, again.holds)
    assert not torch.equal(first.holds, other.holds)
    assert torch.equal(first.train.rows, populate(table(), spec(num=20), 1).train.rows)


def test_a_client_whose_rows_all_lack_a_modality_does_not_hold_it(table):
    columns = table(present={"a": table().client != 2})
    population = populate(columns, spec(partition="by-client", num=None), 1)
    assert population.holds[:, 0].tolist() == [True, True, False, True, True, True]


def test_a_client_left_without_any_modality_is_refused(table):
    columns = table(present={"a": table().client != 2})
    with refuses(DataError, "client 2"):
        populate(columns, spec(partition="by-client", num=None, only={"a": [2]}), 1)


@dataclass(frozen=True)
class Fixed:
    parts: tuple

    def split(self, columns, rows, key):
        return [np.array(part, dtype=np.int64) for part in self.parts]


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        (((0, 1), ()), DataError, "client 1"),
        ((), DataError, "no clients"),
        (((0, 1), (1, 2)), RecipeError, "clients.partition: row 1 twice"),
        (((0, 5),), RecipeError, "clients.partition: row 5"),
        (((0, 700),), RecipeError, "clients.partition: row 700"),
    ],
)
def test_a_partition_of_ones_own_is_checked(table, parts, error, words):
    with refuses(error, words):
        populate(table(), ClientsSpec(partition=Fixed(parts)), 1)


def test_a_partition_of_ones_own_is_used(table):
    with warned("1 class"):
        population = populate(table(), ClientsSpec(partition=Fixed(((0, 1), (2, 3, 4)))), 1)
    assert population.train.sizes.tolist() == [2, 3]


def test_features_that_are_not_finite_never_reach_a_client(table):
    columns = table()
    columns.modalities["b"].values[9] = float("inf")
    with refuses(DataError, "infinite values"):
        populate(columns, spec(), 1)


def test_a_single_class_warns(table):
    with warned("label 0", UserWarning):
        populate(table(label=torch.zeros(600, dtype=torch.int64)), spec(), 1)


def test_more_participants_than_clients_are_refused(table):
    with refuses(RecipeError, "clients.participation: 7 clients"):
        populate(table(), spec(participation=8), 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 0.0}, "clients.alpha: above 0"),
        ({"alpha": -1.0}, "clients.alpha: above 0"),
        ({"alpha": float("nan")}, "clients.alpha: above 0"),
        ({"num": 0}, "clients.num: must be"),
        ({"participation": 0}, "clients.participation: a count"),
        ({"participation": 0.0}, "clients.participation: a share above"),
        ({"participation": 1.5}, "clients.participation: a share above"),
        ({"participation": -3}, "clients.participation: a count"),
        ({"validation": 1.0}, "clients.validation: must be"),
        ({"personal_test": 0.0}, "clients.personal_test: a share between"),
        ({"personal_test": "mached"}, "clients.personal_test: 'matched'"),
        ({"main_share": 0.0}, "clients.main_share: must be"),
        ({"shards": 0}, "clients.shards: must be"),
        ({"keep_both": 1.5}, "clients.keep_both: must be"),
        ({"missing": {"a": -0.1}}, "clients.missing.a: a share"),
        ({"holdings": []}, "clients.holdings: allowed"),
        ({"holdings": [["a"], []]}, "clients.holdings: allowed"),
        ({"on_shortage": "raise"}, "clients.on_shortage: Allowed"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, said):
    with refuses(RecipeError, said):
        ClientsSpec(**options)


def test_misspelt_and_contradicting_options_are_refused(table):
    with refuses(RecipeError, "clients.partition: mean 'dirichlet'"):
        ClientsSpec(partition="dirichlett")
    with refuses(RecipeError, "clients.missing: keep_both"):
        ClientsSpec(missing={"a": 0.1}, keep_both=0.5)
    with refuses(RecipeError, "clients.keep_both: one entry"):
        ClientsSpec(partition="silos", keep_both=0.5)
    with refuses(RecipeError, "clients.num: missing"):
        populate(table(), ClientsSpec(), 1)
    with refuses(RecipeError, "clients.num: counts its clients"):
        populate(table(), ClientsSpec(partition="by-client", num=5), 1)


@pytest.mark.parametrize("options", [{"missing": {"aa": 0.5}}, {"only": {"aa": [0]}}, {"holdings": [["aa"]]}])
def test_modalities_that_the_data_lacks_are_refused_with_the_nearest(table, options):
    with refuses(RecipeError, "data lacks"):
        populate(table(), spec(**options), 1)


def test_clients_listed_twice_or_outside_are_refused(table):
    with refuses(RecipeError, "clients.only.a: lists client 7"):
        populate(table(), spec(only={"a": [7]}), 1)
    with refuses(RecipeError, "clients.only: client 1 twice"):
        populate(table(), spec(only={"a": [1], "b": [1]}), 1)


def test_a_hundred_thousand_clients_are_two_arrays():
    columns = SOURCES["toy"](rows=300_000, shapes={"a": (1,)}).load()
    population = populate(columns, spec(num=100_000, validation=0.4, missing={}), 1)
    assert population.num_clients == 100_000
    assert population.train.offsets.shape == (100_001,)
    assert population.train.sizes.unique().tolist() == [2]


def test_measuring_on_validation_uses_no_test_row(table):
    tested = populate(table(), spec(validation=0.2, personal_test=0.25), 1)
    tuned = populate(table(), spec(validation=0.2, personal_test=0.25, measure_on="validation"), 1)
    hidden = set(tested.test_rows.tolist()) | set(tested.test.rows.tolist())
    used = torch.cat([tuned.train.rows, tuned.test.rows, tuned.validation_rows])
    assert tuned.test_rows.tolist() == tuned.validation_rows.tolist() == tested.validation_rows.tolist()
    assert not hidden & set(used.tolist())
    for trained, own, before in zip(*map(rows_of, (tuned.train, tuned.test, tested.train)), strict=True):
        assert trained | own == before
        assert not trained & own
        assert own


def test_measuring_on_validation_needs_validation_rows(table):
    with refuses(RecipeError, "clients.measure_on: clients.validation"):
        populate(table(), spec(measure_on="validation"), 1)
