"""`[clients] missing_rows`: how many rows lack what, counted by hand; who keeps what; what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError, PolyfedError, RecipeError
from polyfed.data import ClientsSpec, Column, Columns, Population, populate
from polyfed.data.sources import Toy
from polyfed.deploy.app_folder import write_nodes
from polyfed.experiment.checks.check import check
from polyfed.experiment.checks.idle_options import idle_options
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running import checkpoint
from refusals import refuses, warned
from world import algorithm, played, recipe

BIG = Toy(rows=24_000, classes=3, shapes={"a": (2,), "b": (2,), "c": (2,)}, test_share=0.25)
PATTERNS = ["random", "client", "label", "spans"]


def spread(columns: Columns | None = None, key: int = 1, **options: Any) -> Population:
    return populate(columns or BIG.load(), ClientsSpec(**({"num": 6} | options)), key)


def lacking(population: Population, name: str, rows: Any) -> np.ndarray:
    there = population.columns.present.get(name)
    return np.zeros(len(rows), bool) if there is None else ~there.numpy()[np.asarray(rows)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_shares_are_those_of_the_recipe_and_every_row_keeps_a_modality(pattern: str) -> None:
    rates, tested = {"a": 0.8, "b": 0.3, "c": 0.5}, {"a": 0.1, "b": 0.9, "c": 0.4}
    found, found_tested = [], []
    for key in range(6):
        options = {"missing_rows": rates, "missing_rows_test": tested, "missing_rows_concentration": 400.0}
        population = spread(key=key, missing_rows_pattern=pattern, missing_rows_span=7, **options)
        found.append([lacking(population, name, population.train.rows).mean() for name in "abc"])
        found_tested.append([lacking(population, name, population.test_rows).mean() for name in "abc"])
        there = torch.stack(list(population.columns.present.values()))
        assert bool(there.any(0).all()), "a row lacks everything"
    assert np.abs(np.mean(found, 0) - list(rates.values())).max() < 0.02
    assert np.abs(np.mean(found_tested, 0) - list(tested.values())).max() < 0.02


def test_rates_at_the_limit_leave_exactly_one_modality() -> None:
    population = spread(missing_rows={"a": 0.5, "b": 0.9, "c": 0.6})
    there = torch.stack(list(population.columns.present.values())).sum(0)
    assert bool((there[population.train.rows] == 1).all())
    assert abs(lacking(population, "b", population.train.rows).mean() - 0.9) < 0.01


def test_modalities_are_lost_independently_where_the_rates_leave_room() -> None:
    population = spread(missing_rows={"a": 0.4, "b": 0.5})
    a, b = (lacking(population, name, population.train.rows) for name in "ab")
    assert abs((a & b).mean() - 0.2) < 0.01


def test_a_higher_rate_takes_more_from_the_same_rows_and_the_partition_does_not_matter() -> None:
    low, high = (spread(missing_rows={"a": rate}) for rate in (0.2, 0.5))
    others = spread(missing_rows={"a": 0.2}, num=40, partition="dirichlet", min_size=2)
    everywhere = np.arange(len(low.columns))
    assert not (lacking(low, "a", everywhere) & ~lacking(high, "a", everywhere)).any()
    assert (lacking(low, "a", everywhere) == lacking(others, "a", everywhere)).all()


def test_every_client_or_class_draws_its_own_share_from_a_beta() -> None:
    shares = []
    for key in range(40):
        population = spread(key=key, num=10, missing_rows={"a": 0.3}, missing_rows_pattern="client")
        shares += [lacking(population, "a", population.train[k]).mean() for k in range(10)]
    # Beta(1.2, 2.8): mean 0.3, variance 0.3 * 0.7 / 5; plus the binomial noise of 1,800 rows, which is small
    assert abs(np.mean(shares) - 0.3) < 0.03
    assert abs(np.var(shares) - 0.3 * 0.7 / 5) < 0.008
    population = spread(missing_rows={"a": 0.5}, missing_rows_pattern="label", missing_rows_concentration=1.0)
    label = population.columns.label.numpy()
    own = [lacking(population, "a", np.flatnonzero(label == c)).mean() for c in range(3)]
    assert max(own) - min(own) > 0.2
    tested = lacking(population, "a", population.test_rows)
    for c in range(3):
        assert abs(tested[label[population.test_rows] == c].mean() - own[c]) < 0.06, "the class has one share"


@pytest.mark.parametrize("natural", [0, 4])
def test_spans_are_lost_as_a_whole(natural: int) -> None:
    columns = replace(BIG, natural_clients=natural).load()
    population = spread(columns, missing_rows={"a": 0.4, "b": 0.4}, missing_rows_pattern="spans", missing_rows_span=9)
    train = population.train
    if natural:
        client = columns.client.numpy()  # type: ignore[union-attr]
        rows = train.rows.numpy()
        series = [np.sort(rows[client[rows] == one]) for one in range(natural)]
    else:
        series = [np.sort(train[k].numpy()) for k in range(6)]
    for rows in series:
        gone = lacking(population, "a", rows)
        whole = gone[: len(gone) // 9 * 9].reshape(-1, 9)
        assert (whole.all(1) | ~whole.any(1)).all()
        assert 0.3 < whole.all(1).mean() < 0.5


def test_a_client_keeps_its_only_modality_unless_asked() -> None:
    columns = Toy(rows=6000, classes=3, shapes={"a": (2,), "b": (2,)}).load()
    held = {"columns": columns, "holdings": [["a", "b"], ["a"]], "missing_rows": {"a": 0.6, "b": 0.3}}
    population = spread(**held)
    assert not lacking(population, "a", population.train[1]).any()
    assert abs(lacking(population, "a", population.train[0]).mean() - 0.6) < 0.03
    asked = spread(**held, missing_rows_empty=True)
    assert abs(lacking(asked, "a", asked.train[1]).mean() - 0.6) < 0.03
    both = lacking(asked, "a", asked.train[0]) & lacking(asked, "b", asked.train[0])
    assert abs(both.mean() - 0.18) < 0.02, "independent"


def test_rows_that_lack_a_modality_in_the_data_keep_the_other() -> None:
    columns = BIG.load()
    there = torch.rand(len(columns), generator=torch.Generator().manual_seed(0)) < 0.5
    holed = replace(columns, present={"a": there, "c": torch.zeros(len(columns), dtype=torch.bool)})
    with warned("client has training"):
        population = spread(holed, missing_rows={"b": 0.4})
    assert not lacking(population, "b", (~there).nonzero()[:, 0]).any()
    assert abs(lacking(population, "b", there.nonzero()[:, 0]).mean() - 0.4) < 0.02
    assert bool((population.columns.present["a"] == there).all())


def test_a_modality_that_a_client_never_has_is_not_announced() -> None:
    made = recipe(algorithm("fedavg"), clients=ClientsSpec(num=4, missing_rows={"a": 1.0}))
    with warned("client has training"):
        parts, _, ledger = played(made)
    assert parts.fed.clients.owned(0) == ("b",)
    assert {row["block"] for row in ledger if row["destination"] == "server"} == {"b", "shared"}


def test_lost_rows_read_as_zeros_whatever_they_held() -> None:
    columns = BIG.load()
    mapped = {name: replace(column, shift=torch.tensor(2.0)) for name, column in columns.modalities.items()}
    population = spread(replace(columns, modalities=mapped), missing_rows={"a": 0.3})
    column, gone = population.columns.modalities["a"], ~population.columns.present["a"]
    everywhere = torch.arange(len(columns))
    assert bool((column.raw(everywhere)[gone] == 0).all())
    assert bool((column.take(everywhere)[gone] == -2).all())
    assert torch.equal(column.raw(everywhere)[~gone], columns.modalities["a"].values[~gone])
    assert column.values is columns.modalities["a"].values, "values, which may be larger than memory, are not copied"
    assert torch.equal(torch.func.vmap(column.take)(everywhere.view(3, -1)).flatten(0, 1), column.take(everywhere))


def test_training_equals_training_on_a_file_with_these_holes(tmp_path: Path) -> None:
    columns = Toy(rows=240, classes=3).load()
    whole = {name: column.values.numpy() for name, column in columns.modalities.items()}
    facts = {"label": columns.label.numpy(), "split": columns.split.numpy()}
    clients = {"num": 4, "personal_test": 0.2}

    def trained(arrays: dict[str, Any], **more: Any) -> tuple[Any, Any, Any]:
        np.savez(tmp_path / "file.npz", **facts, **arrays)
        data = {"name": "npz", "path": str(tmp_path / "file.npz"), "modalities": ["a", "b"]}
        table = {"rounds": 2, "data": data, "algorithm": {"name": "fedavg"}, "clients": clients | more}
        return played(parse_recipe(table))

    parts, state, ledger = trained(whole, missing_rows={"a": 0.4, "b": 0.3})
    there = parts.population.columns.present
    holed = {name: np.where(there[name].numpy()[:, None], whole[name], np.nan) for name in whole}
    _, same_state, same_ledger = trained(holed)
    assert checkpoint.digest(state) == checkpoint.digest(same_state)
    assert ledger == same_ledger


def test_runs_that_differ_in_their_holes_have_the_same_data() -> None:
    columns = replace(BIG.load(), present={"b": torch.arange(24_000) % 3 > 0})
    prints = {
        spread(columns, key, missing_rows=rates).columns.fingerprint()
        for key, rates in ((1, {}), (1, {"a": 0.4}), (2, {"a": 0.4, "b": 0.3}))
    }
    assert prints == {columns.fingerprint()}


def test_the_folders_of_devices_hold_the_same_holes(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg"), clients=ClientsSpec(num=4, missing_rows={"a": 0.5}, personal_test=0.2))
    parts = played(replace(made, rounds=0))[0]
    for client, folder in enumerate(write_nodes(made, tmp_path)):
        with np.load(folder / "data.npz") as arrays:
            own = torch.cat([parts.population.train[client], parts.population.test[client]])  # type: ignore[index]
            assert (arrays["a_present"] == parts.population.columns.present["a"][own].numpy()).all()
            assert not arrays["a"][~arrays["a_present"]].any()


def test_check_tells_the_share_of_every_client() -> None:
    made = recipe(algorithm("fedavg"), clients=ClientsSpec(num=4, missing_rows={"a": 0.5}, personal_test=0.2))
    checked = check(made)
    parts = played(replace(made, rounds=0))[0]
    for client in range(4):
        facts = checked.facts["clients"][client]
        for entry, shards in (("missing_rows", parts.population.train), ("missing_test_rows", parts.population.test)):
            assert facts[entry] == {"a": pytest.approx(lacking(parts.population, "a", shards[client]).mean())}
    text = repr(checked)
    share = lacking(parts.population, "a", parts.population.train[2]).mean()
    assert f"training rows, client 2 {100 * share:.1f} %" in " ".join(text.split())
    many = check(replace(made, clients=ClientsSpec(num=25, missing_rows={"a": 0.5})))
    assert "training rows of a client, median" in repr(many)
    assert "Missing modalities" not in repr(check(replace(made, clients=ClientsSpec(num=4))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"missing_rows": 1.2}, "clients.missing_rows: share"),
        (
            {"missing_rows": {"a": -0.1}, "missing_rows_test": {"b": 3}},
            "clients.missing_rows_test: test.b = 3",
        ),
        (
            {"missing_rows": 0.9},
            "clients.missing_rows: add up",
        ),
        ({"missing_rows_test": 0.9}, "clients.missing_rows_test: modalities add"),
        ({"missing_rows": {"colour": 0.5}}, "clients.missing_rows: names modality"),
        ({"missing_rows": 1.0, "missing_rows_empty": True}, "class 0"),
        ({"missing_rows": 0.2, "missing_rows_pattern": "block"}, "clients.missing_rows_pattern: client"),
        ({"missing_rows": 0.2, "missing_rows_span": 0}, "clients.missing_rows_span: must be"),
        ({"missing_rows": 0.2, "missing_rows_concentration": 0.0}, "clients.missing_rows_concentration: above 0"),
    ],
)
def test_rates_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with refuses(PolyfedError, said):
        spread(**options)


def test_a_pattern_by_label_needs_classes() -> None:
    columns = replace(BIG.load(), label=torch.randn(24_000), num_classes=1)
    with refuses(RecipeError, "clients.partition: missing_rows_pattern"):
        spread(columns, missing_rows={"a": 0.2}, missing_rows_pattern="label")


def test_a_client_without_any_modality_is_refused() -> None:
    label = torch.arange(40) % 2
    columns = Columns("t", {"a": Column(torch.randn(40, 2))}, label, 2, torch.zeros(40).char(), torch.arange(40))
    with refuses(DataError, "client 0"):
        spread(columns, num=20, missing_rows=0.8, missing_rows_empty=True)


@pytest.mark.parametrize("word", ["sample_missing_rate", "modality_missing_rate"])
def test_the_words_of_others_are_understood(word: str) -> None:
    with refuses(RecipeError, f"clients.{word}: mean 'missing_rows'"):
        parse_recipe({"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "clients": {word: 0.2}})


def test_an_option_without_effect_is_named() -> None:
    clients = {"missing_rows": 0.2, "missing_rows_span": 5}
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}}
    text = "[clients] missing_rows_span = 5 has no effect beside missing_rows_pattern = 'random'"
    assert [*idle_options(parse_recipe(table | {"clients": clients}))] == [text]
    text = "[clients] missing_rows_pattern = 'spans' has no effect beside missing_rows = 0"
    assert [*idle_options(parse_recipe(table | {"clients": {"missing_rows_pattern": "spans"}}))] == [text]
