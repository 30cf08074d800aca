"""[data.columns]: words, empty cells and dates become numbers, fitted to the clients' training rows, in every form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import polyfed
from polyfed.core.errors import DataError, EgressError, PolyfedError, RecipeError
from polyfed.data.column_rules import rules_of
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.data.sources import Npz, Table
from polyfed.experiment.recipes.recipe import load_recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble, population_of
from refusals import refuses, warned

ROWS = 240
DRAW = np.random.default_rng(5)
LABEL = DRAW.integers(0, 2, ROWS)
SEX = np.where(DRAW.random(ROWS) < 0.3 + 0.4 * LABEL, "male", "female")
PORT = DRAW.choice(["S", "C", "Q"], ROWS, p=[0.7, 0.2, 0.1])
AGE = np.where(DRAW.random(ROWS) < 0.2, np.nan, DRAW.normal(30, 10, ROWS).round(1) + 5 * LABEL)
FARE = DRAW.gamma(2, 15, ROWS)
BORN = np.datetime64("1950-01-01") + DRAW.integers(0, 9000, ROWS).astype("m8[D]")
WHO = np.array(["ann", "bob", "cyd"])[np.arange(ROWS) % 3]
SPLIT = np.where(np.arange(ROWS) % 5 == 0, "test", "train")

RULES: dict[str, Any] = {
    "sex": "one-hot",
    "port": {"kind": "embedding", "size": 2},
    "age": "mean",
    "born": {"kind": "date", "start": "1950-01-01"},
}
MODALITIES = {"person": ["sex", "port", "age", "fare"], "when": ["born"]}
OPTIONS: dict[str, Any] = {"columns": RULES, "modalities": MODALITIES, "rounds": 2, "seed": 4}
UNEVEN = "ignore:data. .*features differ in size"

pytestmark = pytest.mark.filterwarnings(UNEVEN)


def frame() -> pd.DataFrame:
    held = {"sex": SEX, "port": PORT, "age": AGE, "fare": FARE, "born": BORN.astype(str), "label": LABEL}
    return pd.DataFrame({**held, "client": WHO, "split": SPLIT})


def arrays() -> dict[str, Any]:
    return {"sex": SEX, "port": PORT, "age": AGE, "fare": FARE, "born": BORN}


class Samples(Dataset[dict[str, Any]]):
    """The rows as the samples of a PyTorch dataset."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        facts = {"label": int(LABEL[row]), "client": WHO[row], "split": SPLIT[row]}
        return {name: array[row] for name, array in arrays().items()} | facts


def forms(folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    named = {"clients": "client", "split": "split"}
    yield "arrays", arrays(), {"labels": LABEL, "clients": WHO, "split": SPLIT}
    yield "frame", frame(), named
    yield "stamps", frame().assign(born=pd.to_datetime(BORN)), named
    yield "dataset", Samples(), named
    halves = {name: part.drop(columns="split") for name, part in frame().groupby("split")}
    yield "splits", {"train": halves["train"], "test": halves["test"]}, {"clients": "client"}
    np.savez(folder / "mine.npz", **arrays(), label=LABEL, client=WHO, split=SPLIT)
    frame().to_csv(folder / "mine.csv", index=False)
    frame().to_parquet(folder / "mine.parquet")
    frame().to_json(folder / "mine.jsonl", orient="records", lines=True, double_precision=15)
    for suffix in ("npz", "csv", "parquet", "jsonl"):
        yield suffix, folder / f"mine.{suffix}", named


def test_the_same_table_gives_the_same_model_in_every_form(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra polyfed[parquet] is not installed")
    found = {}
    for name, data, more in forms(tmp_path):
        found[name] = polyfed.run(data=data, **(OPTIONS | more)).result["state_sha256"]
    splits = found.pop("splits")  # its rows have another order, and so other batches
    assert len(set(found.values())) == 1, found
    parts = [frame()[name == SPLIT] for name in ("train", "test")]
    assert (
        splits == polyfed.run(data=pd.concat(parts), **OPTIONS, clients="client", split="split").result["state_sha256"]
    )


def test_a_recipe_in_a_file_says_the_same(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "mine.csv", index=False)
    one = polyfed.run(data=tmp_path / "mine.csv", out=tmp_path / "run", **OPTIONS)
    assert polyfed.run(tmp_path / "run" / "recipe.toml").result["state_sha256"] == one.result["state_sha256"]


def person(**changed: Any) -> Any:
    """The columns of the modality `person` after the fit."""
    recipe = polyfed.make_recipe(frame(), **(OPTIONS | {"clients": "client", "standardise": False} | changed))
    return population_of(recipe).columns.modalities["person"]


def test_numbers_are_those_of_a_plain_computation() -> None:
    column = person()
    train = SPLIT == "train"
    mean = np.float32(np.nansum(AGE[train]) / np.isfinite(AGE[train]).sum())
    wanted = [
        (SEX[:, None] == ["female", "male"]),
        (PORT[:, None] == ["C", "Q", "S"]),
        np.where(np.isnan(AGE), mean, AGE)[:, None],
        np.isnan(AGE)[:, None],
        FARE[:, None],
    ]
    np.testing.assert_array_equal(column.values, np.concatenate(wanted, 1).astype(float))
    when = population_of(polyfed.make_recipe(frame(), **OPTIONS)).columns.modalities["when"]
    np.testing.assert_array_equal(when.values[:, 0], (BORN - np.datetime64("1950-01-01")).astype(int))


def test_words_and_means_come_from_training_rows_only() -> None:
    changed = frame()
    test = changed["split"] == "test"
    changed.loc[test, "port"] = "nowhere"
    changed.loc[test, "age"] = 1e6
    recipe = polyfed.make_recipe(changed, **OPTIONS, clients="client", standardise=False)
    one, two = population_of(recipe).columns, person()
    assert one.modalities["person"].features == two.features
    assert bool((one.modalities["person"].values[torch.tensor(test.to_numpy()), 2:5] == 0).all())
    assert any("'port' of 'person' has 3 words" in note and "such as 'nowhere'" in note for note in one.notes)


def test_a_client_names_only_words_of_several_rows() -> None:
    held = frame()
    held.loc[[1, 4], "port"] = "secret"
    recipe = polyfed.make_recipe(held, **OPTIONS, clients="client")
    population = population_of(recipe)
    assert population.columns.modalities["person"].features[1].words == ("C", "Q", "S")
    assert all("secret" not in told["person"]["port"].words for told in population.told)
    rare = {**RULES, "port": {"kind": "one-hot", "min_rows": 1}}
    every = population_of(polyfed.make_recipe(held, **(OPTIONS | {"columns": rare}), clients="client"))
    assert every.columns.modalities["person"].features[1].words == ("C", "Q", "S", "secret")
    with refuses(DataError, "word in 900"):
        population_of(
            polyfed.make_recipe(held, **(OPTIONS | {"columns": RULES | {"sex": {"kind": "one-hot", "min_rows": 900}}}))
        )


def test_an_empty_cell_is_a_word_and_no_row_is_lost() -> None:
    held = frame()
    held["port"] = held["port"].where(held["port"] != "Q")
    columns = population_of(polyfed.make_recipe(held, **OPTIONS, clients=2)).columns
    assert columns.modalities["person"].features[1].words == ("", "C", "S")
    assert not columns.present


def test_words_and_marks_are_not_standardised() -> None:
    column = person(standardise=True)
    numeric = [n for feature in column.features for n in feature.numeric]
    assert numeric == [False] * 5 + [True, False, True]
    assert column.scale[~torch.tensor(numeric)].tolist() == [1.0] * 6
    taken = column.take(torch.from_numpy(np.flatnonzero(SPLIT == "train")))
    np.testing.assert_allclose(taken[:, numeric].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(taken[:, numeric].std(0, unbiased=False), 1, rtol=1e-4)


def test_whole_numbers_and_words_of_numbers_are_the_words_that_they_are(tmp_path: Path) -> None:
    held = pd.DataFrame(
        {"a_0": FARE, "code": np.where(LABEL == 0, "1", np.where(FARE > 20, "01", "2")), "label": LABEL}
    )
    held.to_csv(tmp_path / "mine.csv", index=False)
    kinds: dict[str, Any] = {
        "columns": {"code": {"kind": "one-hot", "min_rows": 1}},
        "modalities": {"a": ["a_0", "code"]},
        "rounds": 1,
    }
    recipes = [polyfed.make_recipe(data, **kinds) for data in (held, tmp_path / "mine.csv")]
    for recipe in recipes:
        features = [f for c in population_of(recipe).columns.modalities.values() for f in c.features or ()]
        assert next(f for f in features if f.column == "code").words == ("01", "1", "2")
    numbers = held.assign(code=pd.Series([1.0, np.nan, 3.0] * (ROWS // 3)))
    found = population_of(polyfed.make_recipe(numbers, **kinds)).columns.modalities
    assert next(f for c in found.values() for f in c.features or () if f.column == "code").words == ("", "1", "3")


TABLE = {"person": frame()[["sex", "port", "age", "fare"]], "when": frame()[["born"]]}


def test_predictions_take_the_table_from_a_run_a_folder_and_an_export(tmp_path: Path) -> None:
    run = polyfed.run(data=frame(), out=tmp_path / "run", **OPTIONS, clients="client")
    found = run.predict(TABLE)
    test = torch.from_numpy(SPLIT == "test")
    right = (found.argmax(1) == torch.from_numpy(LABEL))[test].float().mean()
    assert float(right) == pytest.approx(run.result["metrics"]["global"]["accuracy"])
    assert torch.equal(polyfed.load_run(tmp_path / "run").predict(TABLE), found)
    run.export(tmp_path / "model")
    model = polyfed.load_model(tmp_path / "model")
    assert torch.equal(model.predict(TABLE), found)
    numbers = {name: model.numbers(name, value) for name, value in TABLE.items()}
    torch.testing.assert_close(model.module()(numbers), found)
    assert torch.equal(model.predict(numbers), found)
    rows = {"person": TABLE["person"].to_numpy().tolist(), "when": BORN[:, None]}
    assert torch.equal(model.predict(rows), found)
    said = json.loads((tmp_path / "model" / "model.json").read_text())["columns"]["person"]
    assert said[0] == {"column": "sex", "rule": {"kind": "one-hot"}, "words": ["female", "male"], "mean": None}


def test_an_onnx_file_takes_the_numbers_and_says_what_they_mean(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra polyfed[onnx] is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    run = polyfed.run(data=frame(), **OPTIONS, clients="client")
    folder = run.export(tmp_path / "model", onnx=True)
    path = next(folder.glob("*.onnx"))
    props = {prop.key: json.loads(prop.value) for prop in onnx.load(path).metadata_props}
    assert props["columns"]["person"][1]["words"] == ["C", "Q", "S"]
    numbers = {name: run.models.numbers(name, value).numpy() for name, value in TABLE.items()}
    wide = {
        name: value.astype(run.models.module().takes(name).__str__().removeprefix("torch."))
        for name, value in numbers.items()
    }
    got = runtime.InferenceSession(str(path)).run(None, wide)[0]
    np.testing.assert_allclose(got, run.predict(TABLE), rtol=1e-4, atol=1e-5)


def test_unknown_words_count_as_none_of_the_words() -> None:
    run = polyfed.run(data=frame(), **OPTIONS, clients="client")
    two = TABLE["person"].head(2)
    found = []
    for word, told in (("XX", "as 'XX'"), (None, "an empty cell")):
        with warned(told):
            found.append(run.predict({"person": two.assign(port=word), "when": TABLE["when"].head(2)}))
    odd, gone = found
    assert torch.equal(odd, gone)
    assert bool(odd.isfinite().all())
    with refuses(DataError, "column 'age'"):
        run.predict({"person": two.drop(columns="age")})
    with refuses(DataError, "'old' at row"):
        run.predict({"person": two.assign(age="old")})


def test_what_clients_tell_is_announced_and_booked_and_the_policy_decides(tmp_path: Path) -> None:
    recipe = polyfed.make_recipe(frame(), **OPTIONS, clients="client")
    listed = [row for row in polyfed.check(recipe).planned if row.task == "set-up"]
    assert {(row.field, row.block, row.kind, row.allowed) for row in listed} == {
        (name, "person", "statistic", True) for name in ("sex", "port", "age")
    }
    run = polyfed.run(data=frame(), out=tmp_path / "run", **OPTIONS, clients="client")
    rows = [json.loads(line) for line in (tmp_path / "run" / "egress.jsonl").read_text().splitlines()]
    told = [row for row in rows if row["message"] == "ColumnStatistics"]
    assert sorted((row["client"], row["field"]) for row in told) == [
        (client, name) for client in range(3) for name in ("age", "port", "sex")
    ]
    assert {row["verdict"] for row in told} == {"allowed"}
    assert run.result["bytes_up"] >= sum(row["bytes"] for row in rows if row["destination"] == "server")
    quiet = {"person": {"server": ["parameters", "gradients"]}, "shared": {"server": ["parameters", "statistic"]}}
    with refuses(EgressError, "statistic of person"):
        polyfed.run(data=frame(), egress=quiet, **OPTIONS, clients="client")
    stated = {
        "sex": {"kind": "one-hot", "words": ["female", "male"]},
        "port": {"kind": "one-hot", "words": ["S"]},
        "age": {"kind": "mean", "mean": 30.0},
        "born": RULES["born"],
    }
    still = polyfed.run(data=frame(), egress=quiet, **(OPTIONS | {"columns": stated}), clients="client")
    assert still.models.features["person"][1].words == ("S",)


@pytest.mark.parametrize(
    "section",
    [
        {
            "privacy": {"unit": "client", "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0},
            "algorithm": {"name": "fedavg", "aggregation": "uniform"},
        },
        {"secure_aggregation": {}},
    ],
)
def test_noise_and_masks_refuse_a_fit_that_has_neither(section: dict[str, Any]) -> None:
    with refuses(RecipeError, "data.columns: means without noise"):
        assemble(polyfed.make_recipe(frame(), **OPTIONS, clients="client", **section))


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"sex": "onehot"}, "kind: 'onehot'"),
        ({"sex": "embedding"}, "needs size"),
        ({"born": "date"}, "needs start"),
        ({"born": {"kind": "date", "start": "soon"}}, "is no date"),
        ({"sex": {"kind": "one-hot", "mean": 2.0}}, "effect on kind"),
        ({"sex": {"kind": "one-hot", "wrods": ["a"]}}, "wrods: no option 'wrods'"),
        ({"sex": {"kind": "one-hot", "words": ["a", "a"]}}, "each of them"),
        ({"sex": 3}, "sex = 3"),
        ("sex", "a str"),
    ],
)
def test_wrong_rules_are_refused(rules: Any, words: str) -> None:
    with refuses(RecipeError, words):
        rules_of("columns", rules)


def test_a_rule_of_a_column_that_nobody_reads_is_refused() -> None:
    for column, words in (("sox", "mean 'sex'"), ("client", "is the client")):
        with refuses(PolyfedError, words):
            polyfed.make_recipe(frame(), **(OPTIONS | {"columns": RULES | {column: "one-hot"}}), clients="client")


@pytest.mark.parametrize(
    ("written", "more", "wanted"),
    [
        (["03.01.2020", "25.12.2021"], {"format": "%d.%m.%Y"}, [2.0, 724.0]),
        (["2020-01-01 12:00", "2020-01-02T00:00"], {"unit": "hours"}, [12.0, 24.0]),
        (["2020-01-01", None], {"impute": True, "mean": 7.0}, [0.0, 7.0]),
    ],
)
def test_dates_are_numbers_since_the_start(written: list[Any], more: dict[str, Any], wanted: list[float]) -> None:
    rule = {"born": {"kind": "date", "start": "2020-01-01", **more}}
    held = pd.DataFrame({"x": FARE[:24], "born": written * 12, "label": [0, 1] * 12})
    found = polyfed.make_recipe(held, columns=rule, modalities={"x": "x", "born": "born"}, standardise=False)
    np.testing.assert_allclose(population_of(found).columns.modalities["born"].values[:2, 0], wanted)


def test_dates_that_can_be_read_in_two_ways_are_refused() -> None:
    rule: dict[str, Any] = {"born": {"kind": "date", "start": "2020-01-01"}}
    held = pd.DataFrame({"x": FARE[:24], "born": ["03.01.2020", "04.02.2021"] * 12, "label": [0, 1] * 12})
    with refuses(DataError, "day and month"):
        polyfed.make_recipe(held, columns=rule, modalities={"born": "born"})
    with refuses(DataError, "'soon' at row"):
        polyfed.make_recipe(held.assign(born=["2020-01-01", "soon"] * 12), columns=rule, modalities={"born": "born"})


def test_only_tabular_reads_vectors_of_words() -> None:
    with refuses(PolyfedError, "model.encoders.person: 'tabular' has"):
        assemble(polyfed.make_recipe(frame(), **OPTIONS, model={"encoders": {"person": {"kind": "mlp"}}}))
    made = assemble(polyfed.make_recipe(frame(), **OPTIONS, model={"encoders": {"person": {"kind": "tabular"}}}))
    assert made.recipe.model.encoders["person"].embeddings == ((2, 3, 2),)  # type: ignore[attr-defined]


def test_init_names_the_rules_and_takes_them(tmp_path: Path) -> None:
    from polyfed.cli.init import rules_in, write_recipe

    frame()[["sex", "age", "fare", "label"]].to_csv(tmp_path / "my table.csv", index=False)
    with refuses(DataError, "empty cells"):
        write_recipe(tmp_path / "my table.csv", tmp_path / "mine.toml", {})
    rules = rules_in(["sex=one-hot", 'age={ kind = "mean" }'])
    notes = write_recipe(tmp_path / "my table.csv", tmp_path / "mine.toml", {}, rules)
    assert "modality 'features': 3 columns sex to fare" in notes
    run = polyfed.run(tmp_path / "mine.toml")
    assert run.result["dataset"] == "my table"
    assert {f.column for features in run.models.features.values() for f in features} == {"sex", "age", "fare"}
    with refuses(RecipeError, "--column age"):
        rules_in(["age={"])


RECIPE = """
seed = 4
rounds = 2
[data]
name = "npz"
path = "{path}"
modalities = {{ person = ["sex", "port", "age", "fare"], when = ["born"] }}
columns = {columns}
[clients]
partition = "by-client"
[model.encoders]
person = {{ kind = "mlp", hidden = [8] }}
when = {{ kind = "mlp", hidden = [8] }}
[algorithm]
name = "fedavg"
[deployment]
nodes = {nodes}
enrol_seconds = 5.0
"""

FITTED = '{ sex = "one-hot", port = "one-hot", age = "mean", born = { kind = "date", start = "1950-01-01" } }'
STATED = (
    '{ sex = { kind = "one-hot", words = ["female", "male"] }, port = { kind = "one-hot", words = ["C", "Q", "S"] }, '
    'age = { kind = "mean", mean = 31.5 }, born = { kind = "date", start = "1950-01-01" } }'
)
ALLOW = '[allow]\ncolumns = ["sex", "port", "age", "fare", "born"]\n'


class Federation:
    """Devices that each hold the rows of one client, and the simulation of the same rows.

    Args:
        folder: the folder for all files.
        columns: the entry `columns` of [data].
        policy: the policy file of every device.
    """

    def __init__(self, folder: Path, columns: str = FITTED, policy: str = ALLOW, count: int = 2) -> None:
        self.folder, self.count = folder, count
        self.owner = np.arange(ROWS) % count
        np.savez(folder / "all.npz", **arrays(), label=LABEL, client=self.owner, split=SPLIT)
        text = RECIPE.format(path=folder / "all.npz", columns=columns, nodes=count)
        (folder / "recipe.toml").write_text(text)
        (folder / "policy.toml").write_text(policy)
        train = population_of(load_recipe(folder / "recipe.toml")).train
        for client in range(count):
            rows = train[client].numpy()
            held = {name: array[rows] for name, array in arrays().items()}
            np.savez(folder / f"device-{client}.npz", **held, label=LABEL[rows])

    def simulated(self) -> str:
        found: str = polyfed.run(self.folder / "recipe.toml", engine="sequential").result["state_sha256"]
        return found

    def deployed(self) -> dict[str, Any]:
        from engines.direct import over
        from polyfed.deploy import write_app
        from polyfed.deploy.handlers import Deployed
        from polyfed.deploy.server.server import serve
        from polyfed.experiment.running.loop import execute

        app = write_app(self.folder / "recipe.toml", self.folder / "app")
        handler = Deployed(app / "recipe.toml")
        configs = [
            {
                "data": str(self.folder / f"device-{client}.npz"),
                "client": client,
                "modalities": "person,when",
                "policy": str(self.folder / "policy.toml"),
                "state": str(self.folder / f"state-{client}"),
            }
            for client in range(self.count)
        ]
        transport = over(lambda packet, config: handler(packet, configs[config["partition-id"]]), self.count)
        serve(app / "recipe.toml", transport, {"out": str(self.folder / "run")}, execute)
        found: dict[str, Any] = json.loads((self.folder / "run" / "result.json").read_text())
        return found


@pytest.mark.parametrize("columns", [FITTED, STATED])
def test_devices_fit_the_same_words_and_means_as_a_simulation(tmp_path: Path, columns: str) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    federation = Federation(tmp_path, columns, count=1)
    assert federation.deployed()["state_sha256"] == federation.simulated()


def test_a_device_books_what_it_tells_and_the_logs_agree(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from polyfed.report.reading.reconciliation import reconcile

    federation = Federation(tmp_path)
    assert federation.deployed()["rounds"] == 2
    rows = [json.loads(line) for line in (tmp_path / "state-1" / "audit.jsonl").read_text().splitlines()]
    told = {row["field"]: row for row in rows if row.get("message") == "ColumnStatistics"}
    assert {*told} == {"sex", "port", "age"}
    found = reconcile(tmp_path / "run", [tmp_path / "state-0", tmp_path / "state-1"])
    assert not found.findings
    lines = (tmp_path / "state-1" / "audit.jsonl").read_text()
    assert "ColumnStatistics" in lines
    booked = [json.loads(line) for line in (tmp_path / "run" / "egress.jsonl").read_text().splitlines()]
    assert {row["client"] for row in booked if row["message"] == "ColumnStatistics"} == {0, 1}
    run = polyfed.load_run(tmp_path / "run")
    assert run.models.features["person"][1].words == ("C", "Q", "S")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("[limits]\nmin_rows = 1\n", "modalities person"),
        (
            ALLOW + '[egress.person]\nserver = ["parameters"]\n[egress.shared]\nserver = ["parameters", "statistic"]\n',
            "refused to tell",
        ),
        (
            ALLOW + "[require]\nsecure_aggregation = true\n",
            "[require]",
        ),
    ],
)
def test_a_device_refuses_what_its_owner_has_not_allowed(tmp_path: Path, policy: str, words: str) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    federation = Federation(tmp_path, policy=policy)
    with refuses(PolyfedError, words):
        federation.deployed()


def test_a_recipe_cannot_join_an_array_that_means_something_else(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from polyfed.core.registry import Allowance, only
    from polyfed.deploy.device.allowed_arrays import check_arrays

    table: dict[str, Any] = {
        "data": {"name": "npz", "path": "x.npz", "modalities": {"person": ["sex", "client"]}},
        "algorithm": {"name": "fedavg"},
    }
    with only(Allowance(columns=("sex", "client", "scan"))):
        for name, said in (("client", "data.client: 'client'"), ("scan", "'scan'")):
            table["data"]["modalities"]["person"] = ["sex", name]
            with refuses(PolyfedError, said):
                check_arrays(parse_recipe(table), ("person", "scan"))
    with only(Allowance(columns=("sex", "person"))), refuses(PolyfedError, "'person'"):
        table["data"]["modalities"] = {
            "scan": ["sex", "person"]
        }  # the array of persons, which no recipe makes a feature
        check_arrays(parse_recipe(table), ("scan",))


LABS = pd.DataFrame(
    {"crp": [1.0, None, 3.0, None] * 10, "wbc": [None, None, 5.0, 6.0] * 10, "age": [30.0, None, 50.0, 60.0] * 10}
).assign(sex=["f", "m", "m", "f"] * 10, label=[0, 1] * 20)
LAB_RULES = {"crp": "mean", "wbc": "mean", "age": "mean", "sex": "one-hot"}
LAB_GROUPS = {"lab": ["crp", "wbc"], "age": ["age"], "sex": ["sex"]}


@pytest.mark.parametrize("unmeasured", ["absent", "fill"])
def test_a_row_without_any_measured_value_lacks_the_modality_unless_it_is_filled(
    unmeasured: str, tmp_path: Path
) -> None:
    LABS.to_csv(tmp_path / "labs.csv", index=False)
    arrays = {name: LABS[name].to_numpy() for name in LAB_RULES}
    np.savez(
        tmp_path / "labs.npz", label=LABS.label, **{k: v.astype(str) if k == "sex" else v for k, v in arrays.items()}
    )
    options = {"modalities": LAB_GROUPS, "columns": LAB_RULES, "test_share": 0.0, "unmeasured": unmeasured}
    tables = {
        "frame": table_of(LABS, Given(labels="label", **(options | {"columns": rules_of("columns", LAB_RULES)}))),
        "csv": Table(path=str(tmp_path / "labs.csv"), **options).load(),
        "npz": Npz(path=str(tmp_path / "labs.npz"), **options).load(),
    }
    gone = LABS.crp.isna() & LABS.wbc.isna()
    for form, columns in tables.items():
        lacks = {name: (~there).tolist() for name, there in columns.present.items()}
        assert lacks == ({"lab": gone.tolist()} if unmeasured == "absent" else {}), form
        assert any("only empty cells" in note for note in columns.notes) is (unmeasured == "absent"), form


def test_new_rows_without_any_measured_value_lack_it_as_in_training() -> None:
    new = LABS[:4].drop(columns="label")
    each = {}
    for unmeasured in ("absent", "fill"):
        kwargs = {"modalities": LAB_GROUPS, "columns": LAB_RULES, "unmeasured": unmeasured}
        done = polyfed.run(data=LABS, labels="label", rounds=1, clients=2, seed=1, **kwargs)
        each[unmeasured] = done.predict(new)
        assert done.models.rows.unmeasured == unmeasured
    assert torch.isfinite(each["absent"]).all()
    assert not torch.allclose(each["absent"][1], each["fill"][1])
