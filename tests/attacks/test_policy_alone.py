"""`polyfed check RECIPE --node policy.toml` knows every modality of the recipe, whoever names it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed.core.errors import EgressError, NotAllowed, RecipeError
from polyfed.deploy.device.recipe_check import Inspection, inspect
from polyfed.experiment.checks.check import check
from polyfed.experiment.recipes.recipe import parse_recipe
from refusals import refuses

MLP = {"kind": "mlp", "hidden": [4]}
NAMED: dict[str, Any] = {"encoders": {"lab": MLP, "stay": MLP}}
GUESSED: dict[str, dict[str, Any]] = {"none is named": {}, "one is named": {"encoders": {"lab": MLP}}}
POLICIES = {
    "nothing but parameters": '[egress."*"]\nserver = ["parameters"]\n',
    "a modality stays": "[egress.stay]\nserver = []\n",
    "losses only": '[egress."*"]\nserver = []\n[egress.shared]\nserver = ["statistic"]\n',
    "a demand": "[require]\nsecure_aggregation = true\n",
}


def table(folder: Path) -> dict[str, Any]:
    rows = "".join(f"{'' if i % 7 == 0 else i % 5},{i % 4}.5,{'abc'[i % 3]},{i % 2}\n" for i in range(40))
    (folder / "rows.csv").write_text("crp,age,ward,label\n" + rows)
    return {
        "name": "table",
        "path": str(folder / "rows.csv"),
        "modalities": {"lab": ["crp", "age"], "stay": ["ward"]},
        "columns": {"crp": "mean", "ward": "one-hot"},
    }


def arrays(folder: Path) -> dict[str, Any]:
    values = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    np.savez(folder / "rows.npz", lab=values, stay=values, label=np.arange(40) % 2)
    return {"name": "npz", "path": str(folder / "rows.npz"), "modalities": ["lab", "stay"]}


def asked(data: dict[str, Any], model: dict[str, Any], policy: Path) -> Inspection:
    sections = {"data": data, "clients": {"num": 2}, "model": model, "algorithm": {"name": "fedavg"}}
    return inspect(parse_recipe(sections), str(policy))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("source", [table, arrays])
def test_guessed_encoders_leave_as_named_ones(source: Any, policy: str, tmp_path: Path) -> None:
    data, file = source(tmp_path), tmp_path / "policy.toml"
    file.write_text(POLICIES[policy])
    named = asked(data, NAMED, file)
    assert named.refused or named.breaches, "the policy forbids something"
    assert {row.block for row in named.planned} == {"lab", "stay", "shared"}
    for model in GUESSED.values():
        found = asked(data, model, file)
        assert found.policy.table(found.node.held) == named.policy.table(named.node.held)
        sent = [{(row.task, row.field, row.block): row.allowed for row in one.planned} for one in (found, named)]
        assert sent[0] == sent[1]
        assert found.breaches == named.breaches


def test_without_data_and_encoders_the_check_does_not_say_what_leaves(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(POLICIES["nothing but parameters"])
    found = asked(arrays(tmp_path) | {"path": "elsewhere.npz"}, {}, file)
    assert not found.planned
    assert "cannot be read here" in found.unchecked


def test_the_columns_of_a_modality_without_an_encoder_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(POLICIES["nothing but parameters"])
    found = asked(table(tmp_path), {}, file)
    assert {(row.field, row.block) for row in found.refused if row.task == "set-up"} == {
        ("crp", "lab"),
        ("ward", "stay"),
    }


GUARD = "[egress.Ward]\nserver = []\n"
READS_WARD: dict[str, dict[str, Any]] = {
    "as part of a modality": {"modalities": {"lab": ["age", "ward"]}, "columns": {"ward": "one-hot"}},
    "by a pattern": {
        "modalities": {"lab": ["crp", "a*"], "stay": ["w*"]},
        "columns": {"crp": "mean", "ward": "one-hot"},
    },
    "as labels": {"modalities": {"lab": ["age"]}, "columns": {}, "label": "ward"},
}


@pytest.mark.parametrize("how", READS_WARD)
def test_a_row_keeps_a_column_out_of_all_modalities(how: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(GUARD)
    data = table(tmp_path) | READS_WARD[how]
    with refuses(EgressError, "policy row"):
        asked(data, {}, file)
    sections = {
        "data": data,
        "clients": {"num": 2},
        "algorithm": {"name": "fedavg"},
        "egress": {"ward": {"server": []}},
    }
    with refuses(EgressError, "policy row"):
        check(parse_recipe(sections))


def test_a_row_of_a_column_that_nothing_reads_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    data = table(tmp_path) | {"modalities": {"lab": ["age"]}, "columns": {}}
    found = []
    for text in (GUARD, "[limits]\nmin_rows = 1\n"):
        file.write_text(text)
        found.append(asked(data, {}, file).planned)
    assert found[0] == found[1]
    sections = {"data": data, "clients": {"num": 2}, "algorithm": {"name": "fedavg"}}
    rows = {"egress": {"ward": {"server": []}}}
    assert check(parse_recipe(sections | rows)).planned == check(parse_recipe(sections)).planned
    with refuses(RecipeError, "egress.wart: no row 'wart'"):
        check(parse_recipe(sections | {"egress": {"wart": {"server": []}}}))


def test_the_list_of_allowed_columns_holds_for_tables(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[allow]\ncolumns = ["crp", "age"]\n')
    with refuses(NotAllowed, 'columns = ["ward"]'):
        asked(table(tmp_path), {}, file)
    file.write_text('[allow]\ncolumns = ["crp", "age", "ward"]\n')
    assert asked(table(tmp_path), {}, file).planned


def test_a_row_that_resembles_a_modality_is_no_guard(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("[egress.staj]\nserver = []\n")
    with refuses(RecipeError, "egress.staj: mean 'stay'"):
        asked(arrays(tmp_path), {}, file)
