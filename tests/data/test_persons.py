"""`[data] person`: no random split and no partition divides the rows of a person; a split of the data that does is
told.

The rows of a patient are alike, so a model that has seen one of them knows the others.
"""

import re
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from polyfed.cli.application import main
from polyfed.core import keys
from polyfed.core.errors import DataError, RecipeError
from polyfed.data import ClientsSpec, Columns, Partition, Population, populate
from polyfed.data.columns import LEFT_OUT, TEST, TRAIN
from polyfed.data.partitions.persons import told_of_persons, whole_persons
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.data.sources import SOURCES, Npz, Table
from polyfed.experiment.recipes.defaults import guesses_of
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.recipe import parse_recipe
from refusals import refuses, warned

PERSONS, CLASSES, SITES = 240, 4, 6


def rows(seed: int = 0, *, shared: bool = False, several: bool = False) -> dict[str, np.ndarray]:
    """One to three rows of each person, who has one class and one site.

    Args:
        shared: whether a tenth of the rows is of another site than the person's.
        several: whether a tenth of the rows has another class than the person's.
    """
    draw = np.random.default_rng(seed)
    person = np.repeat(np.arange(PERSONS), draw.choice([1, 2, 3], PERSONS))
    draw.shuffle(person)
    label, site = (draw.integers(0, most, PERSONS)[person] for most in (CLASSES, SITES))
    site = np.where(draw.random(len(person)) < 0.1 * shared, draw.integers(0, SITES, len(person)), site)
    label = np.where(draw.random(len(person)) < 0.1 * several, draw.integers(0, CLASSES, len(person)), label)
    names = np.array([f"P{9 * number:05d}" for number in range(PERSONS)])
    x = draw.normal(size=(len(person), 4)) + label[:, None]
    return {"x": x.astype(np.float32), "label": label, "site": site, "patient": names[person]}


def frame_of(held: dict[str, np.ndarray]) -> pd.DataFrame:
    features = {f"x_{k}": held["x"][:, k] for k in range(held["x"].shape[1])}
    return pd.DataFrame({**features, **{name: held[name] for name in ("label", "site", "patient")}})


class Samples(Dataset[Any]):
    def __init__(self, held: dict[str, np.ndarray]) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held["label"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {name: values[row] for name, values in self.held.items()}


def of_csv(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    frame_of(held).to_csv(folder / "rows.csv", index=False)
    return Table(
        path=str(folder / "rows.csv"), modalities={"x": "x_*"}, client="site", person="patient" if person else ""
    ).load()


def of_npz(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    arrays: dict[str, Any] = {"x": held["x"], "label": held["label"], "client": held["site"]}
    np.savez(folder / "rows.npz", **arrays, **{"person" if person else "subject": held["patient"]})
    return Npz(path=str(folder / "rows.npz"), modalities=("x",)).load()


def of_arrays(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    who = held["patient"] if person else None
    return table_of({"x": held["x"]}, Given(labels=held["label"], clients=held["site"], person=who))


def of_frame(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    return table_of(frame_of(held), Given(clients="site", person="patient" if person else None))


def of_frame_and_array(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    who = held["patient"] if person else None
    return table_of(frame_of(held).drop(columns="patient"), Given(clients="site", person=who))


def of_samples(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    modalities = {"x": "x"} if person else ["x"]
    given = Given(clients="site", modalities=list(modalities), person="patient" if person else None)
    return table_of(Samples(held), given)


def of_hub(held: dict[str, np.ndarray], folder: Path, person: bool) -> Columns:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    table = {"x": held["x"].tolist(), "label": held["label"], "site": held["site"], "patient": held["patient"]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(table)}).save_to_disk(str(folder / "hub"))
    options: dict[str, Any] = {"modalities": {"x": "values"}, "client": "site", "cache": str(folder / "cache")}
    return SOURCES["hf"](path=str(folder / "hub"), person="patient" if person else "", **options).load()  # type: ignore[call-arg]


READERS: dict[str, Callable[[dict[str, np.ndarray], Path, bool], Columns]] = {
    "table": of_csv,
    "npz": of_npz,
    "memory": of_arrays,
    "frame": of_frame,
    "frame and array": of_frame_and_array,
    "samples": of_samples,
    "hf": of_hub,
}


def sides_of(columns: Columns, person: np.ndarray, population: Population | None) -> list[set[str]]:
    """The persons who train, who validate, and who test: of the table alone, or of a population."""
    split = columns.split
    held = [split == TRAIN, torch.zeros_like(split, dtype=torch.bool), split == TEST]
    if population is not None:
        own = [part.rows for part in (population.own_validation,) if part is not None]
        test = [population.test.rows] if population.test is not None else []
        held = [
            population.train.rows,
            torch.cat([population.validation_rows, *own]),
            torch.cat([population.test_rows, *test]),
        ]
    return [set(person[part.numpy()].tolist()) for part in held]


def assert_apart(sides: list[set[str]]) -> None:
    assert not sides[0] & sides[1]
    assert not sides[0] & sides[2]
    assert not sides[1] & sides[2]


def divides(sides: list[set[str]]) -> bool:
    return bool(sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


@pytest.mark.parametrize("source", READERS)
def test_the_test_set_of_every_source_keeps_persons_whole_and_classes_in_their_shares(
    source: str, tmp_path: Path
) -> None:
    held = rows()
    columns = READERS[source](held, tmp_path, True)
    sides = sides_of(columns, held["patient"], None)
    assert_apart(sides)
    assert sides[2]
    assert not any("patient" in name for column in columns.modalities.values() for name in column.names)
    for number in range(CLASSES):
        share = float((columns.split[columns.label == number] == TEST).float().mean())
        assert abs(share - 0.2) < 0.03, number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert divides(sides_of(READERS[source](held, tmp_path, False), held["patient"], None))  # else nothing is shown


SPLITS: dict[str, dict[str, Any]] = {
    "server validation": {"num": 5, "validation": 0.2},
    "personal validation": {"num": 5, "personal_validation": 0.2},
    "personal test": {"num": 5, "personal_test": 0.25},
    "both": {"num": 5, "personal_test": 0.25, "validation": 0.2},
    "measured on validation": {"num": 5, "personal_test": 0.25, "validation": 0.2, "measure_on": "validation"},
    "dirichlet": {"partition": "dirichlet", "num": 4, "alpha": 1.0, "validation": 0.1, "personal_test": 0.2},
    "authors": {"partition": "dirichlet-authors", "num": 4, "alpha": 1.0, "personal_validation": 0.2},
    "classes": {"partition": "classes-per-client", "num": 6, "classes_per_client": 2, "validation": 0.2},
    "natural": {"partition": "by-client", "validation": 0.2, "personal_test": 0.2},
    "natural, own": {"partition": "by-client", "personal_validation": 0.2, "personal_test": 0.2},
    "shards": {"partition": "by-client", "shards": 2, "alpha": 5.0, "min_size": 3, "validation": 0.2},
    "test clients": {"partition": "by-client", "test_clients": 0.3, "validation": 0.2},
    "folds": {"partition": "iid", "num": 3, "folds": 3, "fold": 2, "personal_validation": 0.2},
    "other clients": {"partition": "by-client", "test_clients": 0.2, "validation_clients": 0.3},
    "silos": {"partition": "silos", "silos": 3, "holdings": [["x"], ["x"]], "validation": 0.2, "personal_test": 0.2},
    "overlap": {"partition": "silos", "silo_sizes": [2.0, 1.0], "silo_overlap": 0.5, "holdings": [["x"], ["x"]]},
}


@settings(max_examples=60, deadline=None)
@given(
    split=st.sampled_from(sorted(SPLITS)),
    seed=st.integers(0, 99),
    shared=st.booleans(),
    several=st.booleans(),
)
def test_no_split_divides_a_person_and_no_partition_does(split: str, seed: int, shared: bool, several: bool) -> None:
    several = several and split != "classes"
    held = rows(seed % 5, shared=shared, several=several)
    columns = of_arrays(held, Path(), True)
    spec = ClientsSpec(**SPLITS[split])
    made = populate(columns, spec, keys.key(seed, "population"))
    assert made.columns.person is None  # nothing but the splits reads it
    sides = sides_of(columns, held["patient"], made)
    assert_apart(sides if spec.measure_on is None else [sides[0], sides[1] | sides[2], set()])
    again = populate(columns, spec, keys.key(seed, "population"))
    assert torch.equal(made.train.rows, again.train.rows)
    assert torch.equal(made.validation_rows, again.validation_rows)
    if spec.partition == "by-client" and spec.shards == 1:
        return  # the data says who its clients are
    of_silo = made.silo if made.silo is not None else torch.arange(len(made.train))
    owner = of_silo[made.train.owner].numpy()
    pairs = {*zip(held["patient"][made.train.rows.numpy()].tolist(), owner.tolist(), strict=True)}
    site = len({*zip(held["patient"].tolist(), held["site"].tolist(), strict=True)}) if spec.shards > 1 else 0
    people = {who for who, _ in pairs}
    assert len(pairs) == len(people) or (site and len(pairs) <= site)


@pytest.mark.parametrize("split", [name for name in SPLITS if name not in ("test clients", "other clients", "folds")])
def test_without_persons_the_same_splits_divide_some(split: str) -> None:
    held = rows()
    columns = of_arrays(held, Path(), False)
    assert divides(sides_of(columns, held["patient"], populate(columns, ClientsSpec(**SPLITS[split]), 3)))


def test_devices_of_a_silo_that_divide_its_rows_divide_no_person() -> None:
    held = rows()
    columns = of_arrays(held, Path(), True)
    made = populate(columns, ClientsSpec(**SPLITS["silos"]), 1)
    first, second = (set(held["patient"][made.train[k].numpy()].tolist()) for k in (0, 1))
    assert first
    assert second
    assert not first & second


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=80),
    share=st.floats(0.1, 0.5),
    owners=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_whole_persons_come_near_the_share_of_each_owner(
    sizes: list[int], share: float, owners: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    person = np.repeat(np.arange(len(sizes)), sizes)
    owner, label = draw.integers(0, owners, len(sizes))[person], draw.integers(0, 2, len(sizes))[person]
    off = whole_persons(person, owner, label, share, seed)
    for who in range(len(sizes)):
        assert off[person == who].all() or not off[person == who].any()
    for one in np.unique(owner):
        own = owner == one
        assert not off[own].all()
        if len(np.unique(person[own])) >= 8:
            assert abs(off[own].sum() - share * own.sum()) <= max(sizes)


def test_rows_of_one_person_at_several_clients_are_left_out_where_others_test() -> None:
    held = rows(shared=True)
    columns = of_arrays(held, Path(), True)
    made = populate(columns, ClientsSpec(partition="by-client", test_clients=0.3, validation_clients=0.3), 1)
    gone = int((made.columns.split == LEFT_OUT).sum())
    assert gone > 0
    assert any("left out" in note for note in made.columns.notes)


def test_words_that_differ_by_case_or_blanks_are_one_person() -> None:
    held = rows()
    held["patient"] = np.array([f" {name.lower()} " if k % 2 else name for k, name in enumerate(held["patient"])])
    columns = of_arrays(held, Path(), True)
    person = np.char.upper(np.char.strip(held["patient"]))
    assert_apart(sides_of(columns, person, None))


def test_a_split_of_the_data_that_divides_persons_is_told_once_with_counts() -> None:
    held = {"x": np.zeros((6, 2), np.float32), "label": np.array([0, 1, 0, 1, 0, 1])}
    given = Given(
        labels=held["label"], person=[7, 7, 7, 8, 9, 9], split=["train", "test", "test", "train", "train", "train"]
    )
    columns = table_of({"x": held["x"]}, given)
    with warned("divide persons") as told:
        populate(columns, ClientsSpec(num=2), 1)
    said = [str(one.message) for one in told if "divide persons" in str(one.message)]
    assert len(said) == 1
    assert "1 person has" in said[0]
    assert "2 rows of them" in said[0]
    apart = replace(given, person=[7, 8, 8, 9, 6, 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        populate(table_of({"x": held["x"]}, apart), ClientsSpec(num=2), 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partition": "main-class", "num": 3}, "clients.partition: exact rows"),
        ({"partition": "classes-per-client", "num": 6, "classes_per_client": 2}, "clients.partition: exact classes"),
        ({"partition": "iid", "num": 3, "row_split": "blocks", "validation": 0.2}, "clients.row_split: blocks"),
        ({"partition": "iid", "num": 900}, "clients.num: is a person"),
    ],
)
def test_what_would_divide_persons_is_refused(options: dict[str, Any], said: str) -> None:
    columns = of_arrays(rows(several=True), Path(), True)
    with refuses(RecipeError, said):
        populate(columns, ClientsSpec(**options), 1)


def test_clients_of_one_person_have_no_share_to_hold_out() -> None:
    held = rows()
    columns = table_of({"x": held["x"]}, Given(labels=held["label"], clients=held["patient"], person=held["patient"]))
    with refuses(DataError, "validation_clients"):
        populate(columns, ClientsSpec(partition="by-client", validation=0.5), 1)
    made = populate(columns, ClientsSpec(partition="by-client", validation_clients=0.2), 1)
    assert_apart(sides_of(columns, held["patient"], made))


@pytest.mark.parametrize("values", [[1.5] * 4, ["a", "", "b", "c"], [None, "a", "b", "c"], [[1], [2], [3], [4]]])
def test_persons_are_words_or_whole_numbers_of_every_row(values: list[Any]) -> None:
    with refuses(DataError, "person"):
        table_of({"x": np.zeros((4, 2), np.float32)}, Given(labels=[0, 1, 0, 1], person=values))


def test_a_column_of_persons_is_no_feature_and_must_be_there(tmp_path: Path) -> None:
    frame_of(rows()).assign(x_9=np.arange(len(rows()["label"])) // 2).to_csv(tmp_path / "rows.csv", index=False)
    source = Table(path=str(tmp_path / "rows.csv"), modalities={"x": "x_*"}, person="x_9")
    with refuses(DataError, "the person"):
        source.load()
    with refuses(DataError, "'patiend'"):
        replace(source, person="patiend").load()


def test_an_own_partition_gets_a_row_of_each_person() -> None:
    seen: list[int] = []

    class Halves(Partition):
        def split(self, columns: Columns, rows: np.ndarray, key: int) -> list[np.ndarray]:
            seen.extend(rows.tolist())
            return [rows[::2], rows[1::2]]

    held = rows()
    columns = of_arrays(held, Path(), True)
    made = populate(columns, ClientsSpec(partition=Halves()), 1)
    people = held["patient"][(columns.split == TRAIN).numpy()]
    assert len(seen) == len(set(people.tolist()))
    assert sorted(made.train.rows.tolist()) == columns.rows(TRAIN).tolist()


def sick(rows_of: int = 480, **columns: Any) -> pd.DataFrame:
    """A table with features and labels, and more columns."""
    draw = np.random.default_rng(1)
    made = {f"x_{k}": draw.normal(size=rows_of) for k in range(3)}
    return pd.DataFrame({**made, "label": draw.integers(0, 2, rows_of), **columns})


def told_of(frame: pd.DataFrame, **given_too: Any) -> list[str]:
    return told_of_persons(table_of(frame, Given(modalities={"x": "x_*"}, **given_too)))


DRAW = np.random.default_rng(5)
LOUD = {
    "words": [f"P{n:04d}" for n in DRAW.integers(0, 240, 480)],
    "rare copies": [f"K-{n}" for n in np.where(np.arange(480) < 80, np.arange(480) // 2, np.arange(480))],
    "numbers": DRAW.integers(10_000, 10_300, 480).tolist(),
    "patient_id": (np.arange(480) // 60).tolist(),  # eight patients with many rows: the name says so
    "names": [f"Ana {chr(65 + n % 26)}{chr(65 + n // 26)}" for n in DRAW.integers(0, 200, 480)],
}
QUIET = {
    "site": [f"site {n}" for n in DRAW.integers(0, 8, 480)],
    "hospital": [f"H{n:03d}" for n in DRAW.integers(0, 200, 480)],
    "scanner": [f"S{n}" for n in DRAW.integers(0, 12, 480)],
    "day": [f"2026-{1 + n % 12:02d}-{1 + n % 28:02d}" for n in DRAW.integers(0, 240, 480)],
    "age": DRAW.integers(18, 95, 480).tolist(),
    "years": DRAW.integers(18, 95, 480).tolist(),
    "dose": DRAW.normal(size=480).round(1).tolist(),
    "row": [f"R{n}" for n in range(480)],
    "comment": [f"seen again, well, number {n} of them" for n in DRAW.integers(0, 240, 480)],
    "sex": [["f", "m"][n] for n in DRAW.integers(0, 2, 480)],
    "finding": ["none" if n % 2 else f"F{n % 50}" for n in range(480)],
}


@pytest.mark.parametrize("name", LOUD)
def test_a_column_that_seems_to_name_persons_on_both_sides_is_told(name: str) -> None:
    (told,) = told_of(sick(**{name: LOUD[name]}))
    assert told.startswith(f"{name}: ")
    assert f'[data] person = "{name}"' in told
    both, total = map(int, re.findall(r"\d+", told.removeprefix(name))[:2])
    split = table_of(sick(**{name: LOUD[name]}), Given(modalities={"x": "x_*"})).split.numpy()
    held = np.array(LOUD[name])
    assert both == len({*held[split == TRAIN]} & {*held[split == TEST]})
    assert total == len({*held.tolist()})
    assert told_of(sick(**{name: LOUD[name]}), person=name) == []
    assert told_of(sick(**{name: LOUD[name]}), clients=name) == []


@pytest.mark.parametrize("name", QUIET)
def test_dates_sites_scanners_and_quantities_are_not_told(name: str) -> None:
    assert told_of(sick(**{name: QUIET[name]})) == []


def test_persons_whom_the_split_keeps_apart_are_not_told() -> None:
    words = np.array(LOUD["words"])
    split = np.where(np.char.endswith(words, "7"), "test", "train")
    assert told_of(sick(patient=words), split=split) == []


def test_init_tells_persons_and_its_option_keeps_them_together(tmp_path: Path) -> None:
    frame_of(rows()).to_csv(tmp_path / "rows.csv", index=False)
    known: dict[str, Any] = {"client": "site"}
    made = starter(tmp_path / "rows.csv", known)
    assert [note for note in made.notes if note.startswith("patient: ")]
    made = starter(tmp_path / "rows.csv", known | {"person": "patient"})
    assert not [note for note in made.notes if note.startswith("patient: ")]
    data = tomllib.loads(made.text)["data"]
    assert data["person"] == "patient"
    assert_apart(sides_of(Table(**{k: v for k, v in data.items() if k != "name"}).load(), rows()["patient"], None))


def test_an_unread_array_of_persons_is_told(tmp_path: Path) -> None:
    (told,) = told_of_persons(of_npz(rows(), tmp_path, False))
    assert told.startswith("subject: ")


def of_table(tmp_path: Path, **options: Any) -> Columns:
    words = ["Aachen", "Aachen ", "Basel", "aachen"]
    lines = [f"{i % 7}.5,{i % 2},{words[i % 4]}" for i in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["hb,label,site", *lines, ""]))
    return Table(path=str(tmp_path / "rows.csv"), modalities={"hb": "hb"}, client="site", **options).load()


def test_clients_that_differ_by_case_or_blanks_are_told_with_the_line_that_joins_them(tmp_path: Path) -> None:
    with warned("different clients") as told:
        assert of_table(tmp_path).client_names == ("Aachen", "Aachen ", "Basel", "aachen")
    found = re.search(r"\[data\] (relabel\.site = \{.*?\}) \(polyfed", str(told[0].message))
    assert found is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of_table(tmp_path, **tomllib.loads(found[1])).client_names == ("Aachen", "Basel")
    with refuses(RecipeError, "data.relabel: allowed"):
        of_table(tmp_path, relabel={"site": {"Bern": "Basel"}})
    with refuses(RecipeError, "data.relabel: allowed"):
        of_table(tmp_path, relabel={"sight": {"Aachen ": "Aachen"}})
    with refuses(RecipeError, "data.relabel: allowed"):
        of_table(tmp_path, relabel={"hb": {"1.5": "2.5"}})


def test_the_commands_take_the_column_and_no_file_of_a_run_has_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame_of(rows()).to_csv("rows.csv", index=False)
    named = ["--client", "site", "--person", "patient"]
    for words, code in (
        (["init", "rows.csv", *named], 0),
        (["run", "recipe.toml", "--set", "rounds=1", "--out", "run"], 0),
        (["recommend", "rows.csv", *named, "--minutes", "1e-6", "--methods", "fedavg", "--out", "found"], 4),  # no time
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == code, words
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "rows.csv"]
    assert {"recipe.toml", "result.json", "asked.json"} <= {path.name for path in files}
    assert not [path for path in files if b"P00" in path.read_bytes()]


def test_a_device_is_told_if_its_split_divides_persons(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from polyfed.deploy.device.configuration import NodeConfig
    from polyfed.deploy.device.data import population_on

    x, label = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    split, person = np.arange(40) % 5 == 0, np.arange(40) // 2
    np.savez(tmp_path / "mine.npz", a=x, label=label, split=split.astype(int), person=person)
    table = {"data": {"name": "npz", "path": "x.npz", "modalities": ["a"]}, "algorithm": {"name": "fedavg"}}
    node = NodeConfig(data=str(tmp_path / "mine.npz"), client=0, modalities="a")
    with warned("8 persons have"):
        found = population_on(node, parse_recipe(table), None)
    assert found.columns.person is None
    assert list(found.columns.modalities) == ["a"]


def test_rows_that_are_left_out_count_as_missing_nowhere(tmp_path: Path) -> None:
    a = [f"{i}.5" if i >= 6 else "" for i in range(40)]
    b = [f"{i % 3}.5" if i >= 6 and i % 4 else "" for i in range(40)]
    lines = [f"{x},{y},{i % 2}" for i, (x, y) in enumerate(zip(a, b, strict=True))]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,label", *lines, ""]))
    modalities = {"a": "a", "b": "b"}
    made = starter(tmp_path / "rows.csv", {"modalities": modalities, "empty_rows": "leave-out"})
    wanted = sum(not y for x, y in zip(a, b, strict=True) if x)
    assert [note for note in made.notes if "is missing" in note] == [
        "'a' is missing in 0 of 34 rows",
        f"'b' is missing in {wanted} of 34 rows",
    ]
    recipe = parse_recipe(tomllib.loads(made.text))
    assert f"'b' is missing in {wanted} of 34 rows" in guesses_of(recipe, recipe.data.load())
