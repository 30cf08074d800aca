"""The table: reading samples, standardising, and refusing arrays that do not fit together."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError
from polyfed.data import Column
from polyfed.data.column_scaling import standardised
from polyfed.data.columns import check_finite
from refusals import refuses


def test_take_is_the_affine_map_of_the_stored_values_in_float32():
    stored = torch.arange(24, dtype=torch.uint8).reshape(4, 3, 2)
    column = Column(stored, shift=torch.tensor([[1.0], [2.0], [3.0]]), scale=torch.tensor(2.0))
    taken = column.take(torch.tensor([3, 0]))
    expected = (stored.numpy()[[3, 0]].astype(np.float32) - np.array([[1], [2], [3]])) / 2
    assert taken.dtype == torch.float32
    np.testing.assert_array_equal(taken.numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("index", [None, torch.tensor([0, 2, 2, 1, 0])])
def test_take_with_rows_of_many_clients_equals_taking_each_under_vmap_and_outside(index):
    column = Column(torch.randn(5, 3), shift=torch.ones(3), index=index)
    rows = torch.tensor([[0, 4], [2, 2], [3, 1]])
    each = torch.stack([column.take(own) for own in rows])
    assert torch.equal(column.take(rows), each)
    assert torch.equal(torch.func.vmap(column.take)(rows), each)


def test_rows_that_share_a_sample_have_the_length_of_the_index():
    column = Column(torch.eye(3), index=torch.tensor([2, 2, 0, 1]))
    assert len(column) == 4
    assert column.shape == (3,)
    assert torch.equal(column.take(torch.tensor([0, 1])), torch.eye(3)[[2, 2]])


def test_standardising_matches_numpy_over_training_rows(table):
    columns = standardised(table())
    train = columns.rows(0)
    for name, axes in (("a", (0,)), ("b", (0, 1))):
        raw = columns.modalities[name].values[train].double().numpy()
        expected = (raw - raw.mean(axes)) / raw.std(axes)
        np.testing.assert_allclose(columns.modalities[name].take(train).numpy(), expected, atol=1e-5)


def test_images_are_standardised_per_channel_with_a_large_offset(table):
    image = torch.rand(600, 2, 5, 5) * torch.tensor([1.0, 1e-2]).view(2, 1, 1) + 1000.0
    columns = standardised(table(modalities={"image": Column(image)}))
    raw = image[columns.rows(0)].double().numpy()
    column = columns.modalities["image"]
    np.testing.assert_allclose(column.scale.flatten(), raw.std((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(column.shift.flatten(), raw.mean((0, 2, 3)), rtol=1e-6)


def test_changing_test_own_test_and_guard_rows_changes_no_statistic(table):
    codes = torch.arange(600) % 5 % 3
    columns = table(split_personal=codes.to(torch.int8))
    changed = columns.modalities["a"].values.clone()
    changed[(columns.split != 0) | (codes != 0)] += 100.0
    other = replace(columns, modalities={**columns.modalities, "a": Column(changed)})
    before, after = (standardised(c).modalities["a"] for c in (columns, other))
    assert torch.equal(before.shift, after.shift)
    assert torch.equal(before.scale, after.scale)


def test_rows_that_lack_the_modality_stay_out_of_its_statistics(table):
    has = torch.arange(600) % 2 == 0
    columns = table(present={"a": has})
    raw = columns.modalities["a"].values
    raw[~has] = float("nan")
    column = standardised(columns).modalities["a"]
    np.testing.assert_allclose(column.shift, raw[has & (columns.split == 0)].mean(0), rtol=1e-5)
    check_finite(columns)


def test_constant_features_are_only_centred(table):
    values = torch.full((600, 2), 0.1)
    values[:, 1] = torch.arange(600)
    column = standardised(table(modalities={"a": Column(values)})).modalities["a"]
    assert column.take(torch.arange(600))[:, 0].abs().max() < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_values_that_are_not_finite_are_refused_with_count_and_first_row(table, bad):
    columns = table()
    columns.modalities["a"].values[[17, 40], 2] = bad
    with refuses(DataError, "modality 'a'"):
        check_finite(columns)


def test_standardising_data_with_nan_names_the_modality(table):
    columns = table()
    columns.modalities["b"].values[3] = float("nan")
    with refuses(DataError, "modality 'b'"):
        standardised(columns)


def test_standardising_without_training_rows_is_refused(table):
    with refuses(DataError, "no training rows"):
        standardised(table(split=torch.ones(600, dtype=torch.int8)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modalities": {}}, "no modality"),
        ({"label": torch.zeros(599, dtype=torch.int64)}, "has 600 rows"),
        ({"label": torch.zeros(600)}, "int64"),
        ({"label": torch.full((600,), 5)}, "first 5"),
        ({"label": torch.full((600,), -1)}, "first -1"),
        ({"class_names": ("x", "y")}, "2 names"),
        ({"split": torch.full((600,), 4, dtype=torch.int8)}, "holds 4"),
        ({"split_personal": torch.full((600,), 3, dtype=torch.int8)}, "'split_personal' holds 3"),
        ({"ids": torch.arange(3)}, "'ids' has 3"),
        ({"present": {"aa": torch.ones(600, dtype=torch.bool)}}, "mean 'a'"),
        ({"present": {"a": torch.ones(2, dtype=torch.bool)}}, "present of a"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(table, changes, words):
    with refuses(DataError, words):
        table(**changes)


def test_an_empty_table_is_refused(table):
    with refuses(DataError, "no rows"):
        table(label=torch.zeros(0, dtype=torch.int64))


def test_a_missing_modality_is_named_with_the_nearest(table):
    with refuses(DataError, "modality 'bb'"):
        table().column("bb")


def test_moving_keeps_every_value(table):
    columns = table(present={"a": torch.arange(600) > 3})
    moved = columns.to("cpu")
    rows = torch.arange(10)
    assert torch.equal(moved.column("a").take(rows), columns.column("a").take(rows))
    assert torch.equal(moved.present["a"], columns.present["a"])
