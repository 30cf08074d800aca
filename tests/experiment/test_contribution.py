"""`polyfed contribution`: who added what to a run, from the updates that it kept, without training again."""

import json
import math
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import polyfed
from polyfed.cli import main
from polyfed.core.errors import CheckpointError, DataError, RecipeError, UnknownClient
from polyfed.data import ClientsSpec
from polyfed.evaluation.scores import Evaluation
from polyfed.evaluation.shapley import shapley
from polyfed.experiment.contribution import contribution
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.settings import CheckpointSpec
from polyfed.experiment.results.updates import kept_updates
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.selection import Uniform
from polyfed.training.single_data import SingleClientData
from refusals import refuses
from world import AWKWARD, algorithm, recipe, same


def keeping(name: str = "fedavg", encoders: Any = None, engine: str = "vectorised", **options: Any) -> Recipe:
    """Four clients, of which one lacks a modality, that keep their updates."""
    options = {"evaluation": Evaluation(every=0), "selector": Uniform(participation=1.0)} | options
    made = recipe(algorithm(name, **options), engine, encoders, rounds=3)
    clients = ClientsSpec(num=4, validation=0.3, holdings=[["a", "b"], ["a"], ["a", "b"], ["b"]])
    return replace(made, clients=clients, checkpoint=CheckpointSpec(updates=True))


@pytest.mark.parametrize("encoders", [None, AWKWARD], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_all_updates_averaged_again_are_the_model_of_the_run(encoders: Any, engine: str, tmp_path: Path) -> None:
    done = polyfed.run(keeping(encoders=encoders, engine=engine), tmp_path)
    with patch.object(SingleClientData, "minimise", side_effect=AssertionError("nothing trains again")):
        found = contribution(tmp_path)
    assert found["all"] == pytest.approx(found["run"], abs=1e-6)
    assert found["run"] == pytest.approx(done.result["metrics"]["validation"]["accuracy"], abs=1e-6)
    gain = found["all"] - found["none"]
    for game in ("clients", "modalities", "pairs"):
        assert found[game]["exact"]
        assert math.fsum(line["value"] for line in found[game]["players"]) == pytest.approx(gain, abs=1e-9), (
            "efficiency"
        )
    assert {tuple(line["player"]) for line in found["pairs"]["players"]} == {
        ("0", "a"),
        ("0", "b"),
        ("1", "a"),
        ("2", "a"),
        ("2", "b"),
        ("3", "b"),
    }


def test_bytes_are_those_of_the_ledger(tmp_path: Path) -> None:
    done = polyfed.run(keeping(), tmp_path)
    found = contribution(tmp_path)
    lines = found["clients"]["players"]
    assert sum(line["bytes_up"] for line in lines) == done.result["bytes_up"]
    for line in lines:
        assert line["per_megabyte"] == pytest.approx(line["value"] / line["bytes_up"] * 1e6)


def test_a_client_that_never_took_part_is_no_player_and_equal_clients_get_equal_values(tmp_path: Path) -> None:
    made = keeping()
    made = replace(made, clients=replace(made.clients, holdings=None))
    polyfed.run(made, tmp_path)
    path = tmp_path / "updates"
    from safetensors.torch import load_file, save_file

    for file in path.iterdir():
        kept = load_file(file)
        kept = {k: v for k, v in kept.items() if not k.startswith(("1|", "3|"))}
        kept |= {"1" + k[1:]: v.clone() for k, v in kept.items() if k.startswith("0|")}
        kept |= {"3" + k[1:]: v.clone() for k, v in kept.items() if k.startswith("0|")}
        save_file(kept, file)
    with patch("polyfed.federation.client_registry.ClientRegistry.rows_of", lambda _, ks: dict.fromkeys(ks, 10)):
        found = contribution(tmp_path)
    value = {line["player"]: line["value"] for line in found["clients"]["players"]}
    assert value["0"] == pytest.approx(value["1"], abs=1e-9)
    assert value["0"] == pytest.approx(value["3"], abs=1e-9)
    for file in path.iterdir():
        save_file({k: v for k, v in load_file(file).items() if not k.startswith("2|")}, file)
    left = contribution(tmp_path)
    assert {line["player"] for line in left["clients"]["players"]} == {"0", "1", "3"}


def test_many_players_are_sampled_with_an_error(tmp_path: Path) -> None:
    made = keeping()
    made = replace(made, clients=replace(made.clients, num=9, holdings=None), rounds=1)
    polyfed.run(made, tmp_path)
    found = contribution(tmp_path, orders=20)
    assert found["modalities"]["exact"]
    assert not found["clients"]["exact"]
    assert all(line["error"] > 0 for line in found["clients"]["players"])
    gain = found["all"] - found["none"]
    assert math.fsum(line["value"] for line in found["clients"]["players"]) == pytest.approx(gain, abs=1e-9)


def test_under_secure_aggregation_only_groups_are_known(tmp_path: Path) -> None:
    made = keeping(secure_aggregation=SecureAggregation())
    made = replace(made, clients=replace(made.clients, holdings=None))
    polyfed.run(made, tmp_path)
    assert [set(of) for of in kept_updates(tmp_path, 3)] == [{"0+1+2+3"}] * 3
    found = contribution(tmp_path)
    assert found["groups"]
    assert [line["player"] for line in found["clients"]["players"]] == ["0+1+2+3"]
    assert len(found["modalities"]["players"]) == 2
    assert found["all"] == pytest.approx(found["run"], abs=1e-6)


def test_a_resumed_run_keeps_the_same_updates(tmp_path: Path) -> None:
    made = keeping("scaffold")
    polyfed.run(made, tmp_path / "whole")

    def stop(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, tmp_path / "killed", listeners=[stop])
    polyfed.run(made, tmp_path / "killed", resume=True)
    for one, other in zip(kept_updates(tmp_path / "whole", 3), kept_updates(tmp_path / "killed", 3), strict=True):
        assert one.keys() == other.keys()
        assert all(same(one[player], other[player]) for player in one)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    made = keeping()
    polyfed.run(replace(made, checkpoint=CheckpointSpec()), tmp_path / "plain")
    with refuses(DataError, "contributed"):
        contribution(tmp_path / "plain")
    polyfed.run(replace(made, clients=replace(made.clients, validation=0.0)), tmp_path / "bare")
    with refuses(RecipeError, "no validation rows"):
        contribution(tmp_path / "bare")
    polyfed.run(keeping("local"), tmp_path / "local")
    with refuses(RecipeError, "no global model"):
        contribution(tmp_path / "local")
    polyfed.run(made, tmp_path / "cut")
    (tmp_path / "cut" / "updates" / "round-000002.safetensors").write_bytes(b"noise")
    with refuses(DataError, "is damaged"):
        contribution(tmp_path / "cut")


def test_the_command_prints_tables_with_what_the_audit_says(tmp_path: Path, capsys: Any) -> None:
    polyfed.run(keeping(), tmp_path)
    finding = {
        "attack": "membership",
        "kind": "parameters",
        "block": "a",
        "seen_by": "server",
        "field": "",
        "status": "measured",
        "method": "loss",
        "value": 0.7,
        "guess": 0.5,
        "advantage": 0.2,
        "low": 0.1,
        "high": 0.3,
        "clients": 1,
        "guesses": 9,
        "raw": 0.7,
        "remark": "",
    }
    facts = {"rounds": 3, "clients": 4, "shadows": 0, "defences": [], "findings": [finding]}
    (tmp_path / "leakage.json").write_text(json.dumps(facts))
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["contribution", str(tmp_path), *words])
        assert ended.value.code == 0
    text, _, told = capsys.readouterr().out.partition("{")
    assert "Shapley values by client" in text
    assert "+0.2000" in text
    assert json.loads("{" + told) == json.loads((tmp_path / "contribution.json").read_text())
    by_modality = json.loads("{" + told)["modalities"]["players"]
    assert [line["advantage"] for line in by_modality] == [0.2, None]


def test_updates_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.experiment.results import updates

    made = keeping()
    polyfed.run(made, tmp_path / "whole")
    written = updates.save_file

    def torn(found: Any, path: Path) -> None:
        written(found, path)
        if "000002" in path.name:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(updates, "save_file", torn)
        with refuses(CheckpointError, "--resume"):
            polyfed.run(made, tmp_path / "torn")
    assert [file.name for file in (tmp_path / "torn" / "updates").iterdir()] == ["round-000001.safetensors"]
    polyfed.run(made, tmp_path / "torn", resume=True)
    for one, other in zip(kept_updates(tmp_path / "whole", 3), kept_updates(tmp_path / "torn", 3), strict=True):
        assert all(same(one[player], other[player]) for player in one)


def test_each_reply_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyfed.federation.federation import Federation

    watchers = []
    watched = Federation.watched

    def counted(self: Federation, watch: Any) -> Any:
        watchers.append(watch)
        return watched(self, watch)

    monkeypatch.setattr(Federation, "watched", counted)
    done = polyfed.run(keeping(), tmp_path)
    assert len(watchers) == len(done.rounds) == 3, "one watcher measures and keeps"
    assert done.rounds[-1]["norms"]["clients"]


def test_the_error_of_a_value_holds_that_of_the_validation_rows_and_names_are_those_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, 300)
    x = {m: (draw.normal(size=(300, 3)) + 2 * label[:, None]).astype("float32") for m in "ab"}
    home = np.array(["attic", "barn", "cellar"])[draw.integers(0, 3, 300)]
    np.savez(tmp_path / "data.npz", label=label, client=home, **x)
    text = f'''rounds = 1
data = {{ name = "npz", path = "{tmp_path / "data.npz"}", modalities = ["a", "b"] }}
clients = {{ partition = "by-client", validation = 0.3 }}
algorithm = {{ name = "fedavg" }}
checkpoint = {{ updates = true }}
'''
    (tmp_path / "recipe.toml").write_text(text)
    place = tmp_path / "run"
    run = polyfed.run(tmp_path / "recipe.toml", place)
    assert [one["name"] for one in run.facts["clients"]] == ["attic", "barn", "cellar"]
    loaded = polyfed.load_run(place)
    for model in (run, loaded):
        assert (model.predict(x, client="barn") == model.predict(x, client=1)).all()
    with refuses(UnknownClient, "mean 'barn'"):
        loaded.predict(x, client="bern")
    found = contribution(place, say=print)
    assert "coalitions" in capsys.readouterr().out
    lines = found["clients"]["players"]
    assert [line["name"] for line in lines] == ["attic", "barn", "cellar"]
    assert found["validation_clients"] == 3
    assert all(line["error_of_orders"] == 0 < line["error"] for line in lines if line["value"])
    with pytest.raises(SystemExit):
        main(["contribution", str(place)])
    assert "cellar" in capsys.readouterr().out


def test_the_error_of_rows_is_that_of_their_bootstrap(tmp_path: Path) -> None:
    polyfed.run(keeping(), tmp_path)
    kept: dict[str, Any] = {}

    def shapley_and_rows(players: Any, worth: Any, most: int, orders: int, rows: Any) -> Any:
        shares = shapley(players, worth, most, orders, rows=rows)
        kept[str(players[0])] = shares
        return shares

    with patch("polyfed.experiment.contribution.shapley", shapley_and_rows):
        found = contribution(tmp_path)
    for line in found["clients"]["players"]:
        each = kept["0"].influences[line["player"]]
        assert each.sum() == pytest.approx(0.0, abs=1e-9)
        picks = np.random.default_rng(0).integers(0, len(each), (3000, len(each)))
        assert line["error_of_rows"] == pytest.approx(1.96 * each[picks].sum(1).std(), rel=0.1, abs=1e-12)


FOREIGN: dict[str, Callable[[str, Tensor], dict[str, Tensor]]] = {
    "shape": lambda name, value: {name: torch.zeros(3, 3, 3)},
    "NaN": lambda name, value: {name: value * torch.nan},
    "no number": lambda name, value: {f"x|{name}": value.clone()},
    "a digit of another script": lambda name, value: {f"\u0663|{name}": value.clone()},
    "nobody": lambda name, value: {f"99|{name.partition('|')[2]}": value.clone()},
    "negative": lambda name, value: {f"-1|{name.partition('|')[2]}": value.clone()},
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    polyfed.run(replace(keeping(), rounds=1), folder)
    return folder


@pytest.mark.parametrize("how", FOREIGN)
def test_updates_that_are_not_of_this_run_are_refused_in_words(how: str, kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "run")
    path = tmp_path / "run" / "updates" / "round-000001.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, **FOREIGN[how](name, tensors[name])}, path)
    with refuses(DataError, "updates of round"):
        contribution(tmp_path / "run")


@pytest.mark.parametrize("metric", ["accuracy", "uar", "loss"])
def test_any_metric_of_the_task_is_divided_and_known_with_its_error(metric: str, tmp_path: Path) -> None:
    done = polyfed.run(keeping(), tmp_path)
    found = contribution(tmp_path, metric=metric)
    known = done.result["metrics"]["validation"][metric]
    assert found["metric"] == f"validation.{metric}"
    assert found["rising"] is (metric != "loss")
    assert found["run"] == pytest.approx(-known if metric == "loss" else known, abs=1e-5)
    values = found["clients"]["players"]
    assert math.fsum(line["value"] for line in values) == pytest.approx(found["all"] - found["none"], abs=1e-9)
    assert all((line["error_of_rows"] is None) == (metric == "uar") for line in values)


def test_a_metric_that_the_run_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    polyfed.run(keeping(), tmp_path)
    with refuses(RecipeError, "macro_f1"):
        contribution(tmp_path, metric="macro-f1")


def test_a_total_of_zero_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    polyfed.run(keeping(), tmp_path)
    found = contribution(tmp_path)
    for total in (found["none"], found["all"]):
        monkeypatch.setattr("polyfed.experiment.contribution.contribution", lambda *_: found | {"all": total})  # noqa: B023
        with refuses(SystemExit, "0"):
            main(["contribution", str(tmp_path)])
        assert ("sum to 0" in capsys.readouterr().out) is (total == found["none"])


def test_the_printed_command_makes_a_run_whose_contributions_are_known(tmp_path: Path) -> None:
    """A recipe of `polyfed init` keeps validation rows at the clients, beside which the server can have none."""
    made = keeping()
    own = replace(made.clients, validation=0.0, personal_validation=0.3)
    sets = replace(made.algorithm.evaluation, conformal="split")
    made = replace(made, clients=own, checkpoint=CheckpointSpec(), rounds=1)
    made = replace(made, algorithm=replace(made.algorithm, evaluation=sets))
    polyfed.run(made, tmp_path / "run")
    with pytest.raises(DataError) as told:
        contribution(tmp_path / "run")
    words = shlex.split(str(told.value)[str(told.value).index("polyfed run") :])[1:]
    assert "clients.personal_validation=0" in words
    with refuses(SystemExit, "0"):
        main([*words, "--quiet"])
    assert contribution(tmp_path / "run-updates")["rows"] > 0
