"""`[clients] test_clients` and `folds`: nobody stands on both sides, and the folds test everybody once."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyfed
from polyfed.algorithms import ALGORITHMS
from polyfed.core import keys
from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.data import ClientsSpec, Columns, populate
from polyfed.data.sources import Npz, Table
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.from_data import make_recipe
from polyfed.objective.report import moments, of_moments
from polyfed.report import compare
from refusals import refuses

PEOPLE, WINDOWS = 8, 12


def people(**options: Any) -> Any:
    """A recipe with windows of eight persons, each with an offset of their own, and a test split of single windows."""
    draw = np.random.default_rng(3)
    person = np.repeat(np.arange(PEOPLE), WINDOWS)
    label = np.tile(np.arange(3), PEOPLE * WINDOWS // 3)
    wave = draw.normal(size=(PEOPLE * WINDOWS, 6)) + label[:, None] + 3 * draw.normal(size=(PEOPLE, 6))[person]
    split = np.where(draw.random(PEOPLE * WINDOWS) < 0.25, "test", "train")
    given = {"wave": wave.astype("float32"), "text": wave[:, :2].astype("float32")}
    return make_recipe(given, labels=label, clients=person, split=split, algorithm="fedavg", **options)


def table() -> Columns:
    return people().data.load()


def sides(spec: ClientsSpec, seed: int = 1) -> tuple[set[int], set[int], int]:
    """The persons who train, those who test, and the number of rows on both sides."""
    columns = table()
    found = populate(columns, spec, keys.key(seed, "population"))
    assert columns.client is not None
    train, test = columns.client[found.train.rows], columns.client[found.test_rows]
    return set(train.tolist()), set(test.tolist()), len(train) + len(test)


@settings(max_examples=20, deadline=None)
@given(
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 99),
    partition=st.sampled_from(["by-client", "iid", "dirichlet"]),
)
def test_no_person_stands_on_both_sides_and_no_row_is_lost(share: float, seed: int, partition: str) -> None:
    num: dict[str, Any] = {} if partition == "by-client" else {"num": 2, "min_size": 1}
    train, test, rows = sides(ClientsSpec(partition=partition, test_clients=share, **num), seed)
    assert not train & test
    assert train | test == set(range(PEOPLE))
    assert rows == PEOPLE * WINDOWS
    assert len(test) == max(1, round(share * PEOPLE))


def test_validation_clients_are_drawn_from_those_who_train() -> None:
    """Also if the data's own test rows belong to others."""
    columns = table()
    assert columns.client is not None
    split = torch.where(columns.client < 5, 0, 1).to(columns.split)
    for seed in range(10):
        spec = ClientsSpec(partition="by-client", validation_clients=0.4)
        found = populate(replace(columns, split=split), spec, keys.key(seed, "population"))
        held = set(columns.client[found.validation_rows].tolist())
        assert len(held) == 2
        assert held | set(columns.client[found.train.rows].tolist()) == set(range(5))


@pytest.mark.parametrize(
    ("method", "own", "told"), [("ditto", 0.0, True), ("ditto", 0.25, False), ("fedavg", 0.0, False)]
)
def test_a_personal_part_that_no_score_tests_is_told(method: str, own: float, told: bool) -> None:
    spec = ClientsSpec(partition="by-client", num=None, test_clients=0.25, personal_test=own or None)
    given = replace(people(rounds=1), clients=spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolyfedWarning)
        ran = polyfed.run(replace(given, algorithm=ALGORITHMS[method](train=given.algorithm.train)))
    assert any("no score tests" in text for text in ran.result["concerns"]) == told


def test_named_clients_are_the_test_set() -> None:
    assert sides(ClientsSpec(partition="by-client", test_clients=[2, 5]))[1] == {2, 5}


def test_named_clients_may_be_words_in_every_form_of_data(tmp_path: Any) -> None:
    words = np.array(["zoe", "al", "bo", "12", "7"])
    person = np.repeat(words, 6)
    wave, label = np.random.default_rng(1).normal(size=(30, 4)).astype("float32"), np.tile([0, 1, 2], 10)
    np.savez(tmp_path / "people.npz", wave=wave, label=label, client=person)
    frame = pd.DataFrame({"wave_0": wave[:, 0], "wave_1": wave[:, 1], "label": label, "client": person})
    frame.to_csv(tmp_path / "people.csv", index=False)
    forms = (
        make_recipe({"wave": wave}, labels=label, clients=person).data,
        make_recipe(frame).data,
        Npz(path=str(tmp_path / "people.npz"), modalities=("wave",)),
        Table(path=str(tmp_path / "people.csv"), modalities={"wave": ["wave_0", "wave_1"]}),
    )
    for source in forms:
        columns = source.load()
        found = populate(columns, ClientsSpec(partition="by-client", test_clients=["bo", "7"]), 1)
        assert set(person[found.test_rows.numpy()]) == {"bo", "7"}
        with refuses(RecipeError, "clients.test_clients: you mean"):
            populate(columns, ClientsSpec(partition="by-client", test_clients=["zo"]), 1)


def test_clients_that_are_numbers_may_be_named_too() -> None:
    person = np.repeat([101, 9, 20], 6)
    columns = make_recipe({"wave": np.ones((18, 2)) * person[:, None]}, labels=[0, 1] * 9, clients=person).data.load()
    assert columns.client_names == ("9", "20", "101")
    found = populate(columns, ClientsSpec(partition="by-client", test_clients=["101", 0]), 1)
    assert set(person[found.test_rows.numpy()]) == {101, 9}


def test_data_without_names_takes_numbers_only() -> None:
    with refuses(RecipeError, "clients.test_clients: numbers 0"):
        populate(replace(table(), client_names=None), ClientsSpec(partition="by-client", test_clients=["s1"]), 1)


def test_a_study_runs_the_folds_and_compare_pools_them(tmp_path: Path) -> None:
    columns = table()
    assert columns.client is not None
    wave = columns.modalities["wave"].values.numpy()
    np.savez(tmp_path / "people.npz", wave=wave, label=columns.label.numpy(), client=columns.client.numpy())
    recipe = f"""
        rounds = 1
        data = {{ name = "npz", modalities = ["wave"], path = "{tmp_path / "people.npz"}" }}
        clients = {{ partition = "by-client", folds = 3, fold = 1 }}
        algorithm = {{ name = "fedavg" }}
        model = {{ embedding = 4, encoders = {{ wave = {{ kind = "mlp", hidden = [4] }} }} }}
    """
    (tmp_path / "recipe.toml").write_text(recipe)
    study = {
        "recipe": str(tmp_path / "recipe.toml"),
        "seeds": [1, 2],
        "methods": {"fedavg": {}, "fedprox": {}},
        "grid": {"clients.fold": [1, 2, 3]},
    }
    done = polyfed.sweep(study, tmp_path / "study", jobs=1)
    assert len(list((tmp_path / "study").rglob("result.json"))) >= 12, done
    rows = compare([tmp_path / "study"]).rows()
    assert [(row["label"], row["n"], row["folds"]) for row in rows] == [
        ("fedavg", 6, ["fold=1"] * 2 + ["fold=2"] * 2 + ["fold=3"] * 2),
        ("fedprox", 6, ["fold=1"] * 2 + ["fold=2"] * 2 + ["fold=3"] * 2),
    ]
    assert all("pooled.uar" in row for row in rows)


@pytest.mark.parametrize("folds", [2, 3, PEOPLE])
def test_the_folds_test_every_person_once(folds: int) -> None:
    tested = [sides(ClientsSpec(partition="by-client", folds=folds, fold=i + 1))[1] for i in range(folds)]
    assert sorted(one for fold in tested for one in fold) == list(range(PEOPLE))
    assert max(map(len, tested)) - min(map(len, tested)) <= 1


def test_compare_pools_the_folds_of_a_seed(tmp_path: Any) -> None:
    made = people(rounds=1, standardise=False)
    columns = made.data.load()
    right, who = [], []
    for fold in (1, 2):
        spec = replace(made.clients, partition="by-client", num=None, folds=2, fold=fold)
        done = polyfed.run(replace(made, clients=spec), tmp_path / f"fold{fold}")
        tested = populate(columns, spec, keys.key(made.seed, "population")).test_rows
        guess = done.predict({m: column.values[tested] for m, column in columns.modalities.items()}).argmax(1)
        right.append((guess == columns.label[tested]).double())
        who.append(columns.client[tested])
    found = compare([tmp_path / "fold1", tmp_path / "fold2"])
    (row,) = found.rows()
    assert (row["n"], row["folds"]) == (2, ["fold=1", "fold=2"])
    assert row["label"] == "fedavg"
    assert "pooled.uar" in row
    hits, people_of = torch.cat(right), torch.cat(who)
    assert len(hits) == PEOPLE * WINDOWS, "each row is tested once"
    units = [torch.tensor([len(own), own.sum(), len(own)]) for own in (hits[people_of == p] for p in range(PEOPLE))]
    wanted = of_moments(moments(torch.stack(units).double()).tolist(), share=True, clusters=True)
    assert wanted is not None
    assert row["pooled.score"] == pytest.approx(float(hits.mean()))
    assert (row["pooled.score.low"], row["pooled.score.high"]) == pytest.approx((wanted.low, wanted.high))
    (column,) = (column for column in found.columns if column.name == "pooled.score")
    assert column.title == "accuracy, folds pooled"
    assert " to " in found.cell(found.groups[0], column)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"test_clients": 1.5}, "clients.test_clients: a share between"),
        ({"test_clients": []}, "clients.test_clients: not none"),
        ({"folds": 3}, "clients.fold: belong together"),
        ({"fold": 1}, "clients.folds: belong together"),
        ({"folds": 3, "fold": 4}, "clients.fold: folds = 3"),
        ({"folds": 3, "fold": 1, "test_clients": 0.2}, "clients.test_clients: keep one of"),
        ({"test_clients": [99]}, "clients.test_clients: such natural client"),
        ({"test_clients": 0.99}, "clients.test_clients: nobody would train"),
        ({"folds": 9, "fold": 1}, "clients.folds: folds = 8"),
    ],
)
def test_faults_say_what_is_allowed(options: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        sides(ClientsSpec(partition="by-client", **options))


def test_data_without_persons_is_refused() -> None:
    with refuses(RecipeError, "clients.test_clients: rows belong"):
        populate(replace(table(), client=None), ClientsSpec(num=2, test_clients=0.2), 1)


def test_init_says_when_one_person_stands_on_both_sides(tmp_path: Any) -> None:
    columns = table()
    assert columns.client is not None
    person, wave = columns.client.numpy(), columns.modalities["wave"].values.numpy()
    path = tmp_path / "windows.npz"
    np.savez(path, wave=wave, label=columns.label.numpy(), client=person)
    (note,) = [one for one in starter(path, {}).notes if "both" in one or "were seen" in one]
    assert note.startswith("7 of the natural clients")
    np.savez(path, wave=wave, label=columns.label.numpy(), client=person, split=np.where(person < 2, "test", "train"))
    assert not [one for one in starter(path, {}).notes if "were seen" in one]


def test_settings_can_be_chosen_on_people_who_were_never_seen() -> None:
    columns = table()
    assert columns.client is not None
    spec = ClientsSpec(partition="by-client", test_clients=0.2, validation_clients=0.25)
    found = populate(columns, spec, 7)
    parts = (found.train.rows, found.test_rows, found.validation_rows)
    train, test, held = (set(columns.client[rows].tolist()) for rows in parts)
    assert (len(train), len(test), len(held)) == (4, 2, 2)
    assert train | test | held == set(range(PEOPLE))
    note, few = found.columns.notes[-2:]
    assert "take no part in training (test_clients)" in note
    assert "the score is about 2 clients" in few
    assert "[clients] folds = 8 tests each client once" in few
    many = populate(columns, ClientsSpec(partition="by-client", test_clients=0.7), 7).columns.notes
    assert not any("the score is about" in one for one in many)
    assert not any(one.startswith("no split is given") for one in found.columns.notes)
    with refuses(RecipeError, "clients.validation_clients: left to train"):
        populate(columns, ClientsSpec(partition="by-client", validation_clients=0.99), 7)
