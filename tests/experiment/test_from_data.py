"""`polyfed.run(data=...)`: the same run as from a file; saved as a recipe; resumed with the same data."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed
from polyfed.algorithms.averaging.fedprox import FedProx
from polyfed.core.errors import DataError, PolyfedError, RecipeError
from polyfed.data.sources import CgDigits, Npz
from polyfed.experiment.recipes.file_reading import read_file
from polyfed.experiment.recipes.from_data import OF_A_RUN, DataOptions, with_data
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.federation.attack import Attack
from polyfed.privacy.differential.section import Privacy
from polyfed.training.optimisers import Train
from refusals import refuses

ROWS = 90
LABEL = np.arange(ROWS) % 3
DRAW = np.random.default_rng(0)
AUDIO = (DRAW.normal(size=(3, 6))[LABEL] + DRAW.normal(size=(ROWS, 6))).astype(np.float32)
TEXT = (DRAW.normal(size=(3, 4))[LABEL] + DRAW.normal(size=(ROWS, 4))).astype(np.float32)
WHO = np.arange(ROWS) % 5
DATA: dict[str, Any] = {"audio": torch.from_numpy(AUDIO), "text": TEXT}
OPTIONS: dict[str, Any] = {"labels": LABEL, "clients": WHO, "rounds": 2}
FRAME = pd.DataFrame(AUDIO[:, :3], columns=["a_0", "a_1", "b_0"])


def npz(folder: Path) -> Path:
    np.savez(folder / "data.npz", audio=AUDIO, text=TEXT, label=LABEL, client=WHO)
    return folder / "data.npz"


def test_data_in_memory_runs_as_the_same_data_from_a_file(tmp_path: Path) -> None:
    one = polyfed.run(data=DATA, **OPTIONS)
    two = polyfed.run(data=npz(tmp_path), rounds=2)
    assert one.result["state_sha256"] == two.result["state_sha256"]
    assert one.result["clients"] == 5
    made = polyfed.make_recipe(DATA, **OPTIONS)
    assert polyfed.run(made).result["state_sha256"] == one.result["state_sha256"]
    assert one.predict({"audio": AUDIO, "text": TEXT}).shape == (ROWS, 3)


def test_a_run_in_memory_says_so_resumes_with_its_data_and_loads_without(tmp_path: Path) -> None:
    polyfed.run(data=DATA, out=tmp_path / "run", **OPTIONS)
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert 'name = "memory"' in text
    assert "90 rows of audio (6,), text (4,)" in text
    more = OPTIONS | {"rounds": 3}
    resumed = polyfed.run(data=DATA, out=tmp_path / "run", resume=True, **more)
    whole = polyfed.run(data=DATA, **more)
    assert resumed.result["state_sha256"] == whole.result["state_sha256"]
    assert polyfed.load_run(tmp_path / "run").result == resumed.result
    again = polyfed.run(tmp_path / "run" / "recipe.toml", data=DATA, labels=LABEL, clients=WHO)
    assert again.result["state_sha256"] == whole.result["state_sha256"]
    with refuses(DataError, "program"):
        polyfed.run(tmp_path / "run" / "recipe.toml", out=tmp_path / "run", resume=True)
    with refuses(DataError, "have changed"):
        polyfed.run(data=DATA | {"text": TEXT + 1}, out=tmp_path / "run", resume=True, **more)


def test_sections_and_objects_are_options() -> None:
    made = polyfed.make_recipe(
        DATA,
        labels=LABEL,
        clients={"ids": WHO, "missing": {"text": 0.4}},
        algorithm={"name": "fedprox", "mu": 0.3},
        train={"lr": 0.2},
        model={"embedding": 8, "encoders": {"audio": {"kind": "mlp"}}},
        egress={"*": {"server": ["parameters", "statistic"]}},
        selection={"name": "uniform"},
        seed=4,
    )
    assert made.algorithm == FedProx(mu=0.3, train=Train(lr=0.2))
    assert (made.seed, made.clients.partition, dict(made.clients.missing)) == (4, "by-client", {"text": 0.4})
    assert polyfed.check(made).recipe.model.encoders["text"].kind == "mlp"
    own = polyfed.make_recipe(DATA, labels=LABEL, algorithm=FedProx(mu=0.7))
    assert own.algorithm == FedProx(mu=0.7)
    assert own.clients.num == 10
    assert polyfed.make_recipe(DATA, labels=LABEL, rounds=np.int64(3), train={"lr": np.float32(0.5)}).rounds == 3
    for three in (3, np.int64(3)):
        assert polyfed.make_recipe(DATA, labels=LABEL, clients=three).clients.num == 3
    assert polyfed.make_recipe(CgDigits(), clients=4).data == CgDigits()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.1}, "'lr' belongs in"),
        ({"label": LABEL}, "mean 'labels'"),
        ({"method": "fedavg"}, "mean algorithm=...?"),
        ({"learning_rate": 0.1}, "option 'learning_rate'"),
        ({"num_rounds": 3}, "mean rounds=...?"),
        ({"train": 3}, "train is a"),
        ({"model": torch.nn.Linear}, "model is a"),
        ({"train": dict}, "train is a"),
        ({"task": "regression"}, "task is a"),
        ({"algorithm": "fedavgg"}, "algorithm.name: mean 'fedavg'"),
        ({"train": {"lr": "x"}, "rounds": 0, "model": {"embeding": 3}}, "rounds: nothing would be"),
        (
            {"train": {"epochs": 0}, "rounds": -1, "seed": -2},
            "seed: must be 0",
        ),
        ({"train": {"epochs": 0}, "rounds": 0}, "train.epochs: nothing would be"),
        ({"algorithm": FedProx(), "train": {"lr": 0.1}}, "beside an algorithm"),
        ({"algorithm": {"name": "fedavg", "private": "head"}}, "algorithm.private: a list"),
        ({"clients": True}, "client for each"),
        ({"clients": 3.0}, "clients = 3.0"),
        ({"algorithm": FedProx}, "the class FedProx"),
        ({"algorithm": None}, "algorithm = None"),
        ({"egress": {"audoi": {"server": []}}}, "egress.audoi: mean 'audio'"),
        ({"model": {"encoders": {"video": {"kind": "mlp"}}}}, "model.encoders.video: no such modality"),
    ],
)
def test_wrong_options_are_told_with_their_cure(options: dict[str, Any], words: str) -> None:
    with refuses(PolyfedError, words):
        polyfed.check(polyfed.make_recipe(DATA, **({"labels": LABEL} | options)))


SECURE = {"min_clients": 2}
PRIVATE = {"unit": "client", "delta": 0.1, "noise_multiplier": 1.0, "unprotected": ["statistic"]}


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in ("data", "engine")])
def test_every_section_of_a_recipe_is_an_option(section: str) -> None:
    assert section in DataOptions.__annotations__


def test_privacy_attack_limits_and_secure_aggregation_reach_the_recipe() -> None:
    made = polyfed.make_recipe(
        DATA,
        **OPTIONS,
        algorithm={"name": "fedavg", "aggregation": "uniform"},
        privacy=PRIVATE,
        attack={"name": "sign-flip", "share": 0.2},
        limits={"max_rounds": 5},
        network={},
    )
    assert made.privacy == Privacy(unit="client", delta=0.1, noise_multiplier=1.0, unprotected=("statistic",))
    assert (made.attack, made.limits.max_rounds) == (Attack(name="sign-flip"), 5)
    assert made.network is not None
    secure = polyfed.make_recipe(DATA, **OPTIONS, secure_aggregation=SECURE)
    assert secure.algorithm.secure_aggregation.min_clients == 2
    with refuses(RecipeError, "algorithm object"):
        polyfed.make_recipe(DATA, **OPTIONS, algorithm=FedProx(), secure_aggregation=SECURE)
    fair = {"name": "fedavg", "aggregation": "uniform"}
    run = polyfed.run(data=DATA, **OPTIONS, algorithm=fair, privacy=PRIVATE)
    assert run.result["privacy"]["epsilon"] > 0


def test_arguments_of_a_run_are_among_the_allowed_names() -> None:
    with refuses(RecipeError, "listeners"):
        polyfed.run(data=DATA, **OPTIONS, devise="cpu")  # type: ignore[call-arg]
    with refuses(RecipeError, "argument of polyfed.run"):
        polyfed.make_recipe(DATA, **OPTIONS, out="folder")
    names = {name for name, kind in signature(polyfed.run).parameters.items() if kind.kind is not kind.VAR_KEYWORD}
    assert {*OF_A_RUN, "recipe"} == names


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with refuses(RecipeError, "themselves"):
        polyfed.run(data=DATA, engine="flower", **OPTIONS)
    with refuses(RecipeError, "recipe or its"):
        polyfed.run()
    recipe = polyfed.make_recipe(DATA, **OPTIONS)
    with refuses(RecipeError, "without data"):
        polyfed.run(recipe, rounds=3)
    with refuses(RecipeError, "beside a recipe"):
        polyfed.run(recipe, data=DATA, labels=LABEL, rounds=3)
    with refuses(RecipeError, "labels is an"):
        polyfed.run(data=npz(tmp_path), labels=LABEL)
    with refuses(RecipeError, "source reads"):
        polyfed.make_recipe(Npz(path=str(npz(tmp_path)), modalities=("audio",)), labels=LABEL)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"train": "a.csv", "test": Path("b.csv")},
            "is the path",
        ),
        (
            {"train": DATA, "test": DATA},
            "Join the arrays",
        ),
        (DATA, "data is arrays"),
    ],
)
def test_splits_that_are_files_or_arrays_are_refused_with_the_cure(data: Any, words: str) -> None:
    with refuses(RecipeError, words):
        polyfed.make_recipe(data, labels="emotion")


@pytest.mark.filterwarnings("ignore:data. modality 'features' has the columns")
@pytest.mark.parametrize("data", [DATA, FRAME], ids=["arrays", "data frame"])
@pytest.mark.parametrize("clients", [3, np.int64(3), {"num": 3}, {"ids": WHO, "missing": {"text": 0.3}}])
def test_beside_a_recipe_clients_is_only_the_natural_client_of_each_row(data: Any, clients: Any) -> None:
    recipe = polyfed.make_recipe(DATA, **OPTIONS)
    with refuses(RecipeError, "section [clients]"):
        polyfed.run(recipe, data=data, labels=LABEL, clients=clients)
    found = with_data(recipe, data, {"labels": LABEL, "clients": {"ids": WHO}})
    assert found.data.load().client.tolist() == WHO.tolist()


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
@pytest.mark.parametrize("option", ["labels", "clients", "split", "ids"])
def test_lists_of_values_beside_a_file_are_refused(tmp_path: Path, option: str, suffix: str) -> None:
    path = npz(tmp_path)
    if suffix == ".csv":
        path = tmp_path / "data.csv"
        FRAME.assign(label=LABEL).to_csv(path, index=False)
    with refuses(RecipeError, f"{option} is a"):
        polyfed.make_recipe(path, **{option: list(range(ROWS))})  # type: ignore[misc]
    if option != "clients":  # 3 is the number of clients
        with refuses(RecipeError, f"{option} is 3"):
            polyfed.make_recipe(path, **{option: 3})  # type: ignore[misc]


@pytest.mark.parametrize("form", ["data frame", "file"])
def test_modalities_of_a_table_are_a_dictionary(tmp_path: Path, form: str) -> None:
    data: Any = FRAME.assign(label=LABEL)
    if form == "file":
        data.to_csv(tmp_path / "data.csv", index=False)
        data = tmp_path / "data.csv"
    with refuses(RecipeError, "modalities = ['a_*']"):
        polyfed.make_recipe(data, modalities=["a_*"])
    for wrong in (None, 3.5, [None], []):
        with refuses(RecipeError, "modalities['a']"):
            polyfed.make_recipe(data, modalities={"a": wrong})
    numbered = FRAME.rename(columns={"a_0": 0, "a_1": 1}).assign(label=LABEL)
    found = polyfed.make_recipe(numbered, modalities={"a": [0, 1]}).data.load()
    assert torch.equal(found.column("a").values, torch.from_numpy(AUDIO[:, :2]))


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    read_csv = pd.read_csv
    monkeypatch.setattr(pd, "read_csv", lambda *args, **options: reads.append(args) or read_csv(*args, **options))
    FRAME.assign(label=LABEL, a_0=100 + 5 * AUDIO[:, 0]).to_csv(tmp_path / "data.csv", index=False)
    reading = read_file(tmp_path / "data.csv", {})
    assert len(reads) == 1
    assert reading.source.standardise == "uneven"
    assert reading.columns.fingerprint() == reading.source.load().fingerprint()
