"""What a study may say, and that all that is wrong with it is told at once."""

from pathlib import Path

import pytest
from study_world import RECIPE, table

from polyfed.core.errors import RecipeError
from polyfed.experiment.study.plan import Planner
from polyfed.experiment.study.ranges import Range, flat_keys, values_of
from polyfed.experiment.study.study_file import load_study


def cells(folder: Path, **changes):
    return Planner(load_study(table(folder, **changes))).cells()


def test_ranges_are_lists_of_numbers():
    assert values_of({"low": 1, "high": 4}) == [1, 2, 3, 4]
    assert values_of({"low": 1, "high": 6, "step": 2}) == [1, 3, 5]
    assert values_of({"low": 0.0, "high": 1.0, "step": 0.25}) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert values_of({"low": 0.001, "high": 10.0, "count": 5, "scale": "log"}) == [0.001, 0.01, 0.1, 1.0, 10.0]
    assert values_of({"low": 1, "high": 1000, "count": 4, "scale": "log"}) == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"low": 2, "high": 1}, "must be below"),
        ({"low": 0.0, "high": 1.0, "scale": "log"}, "must be above 0"),
        ({"low": 0.0, "high": 1.0}, "give count"),
        ({"low": 0.0, "high": 1.0, "step": 0.5, "count": 3}, "not both"),
        ({"low": 0.0, "hihg": 1.0}, "did you mean 'high'"),
        ([], "must be a list of values"),
        ([1, 2, 1], "a value twice"),
        (0.1, "must be a list of values"),
    ],
)
def test_a_range_that_says_nothing_is_refused(entry, why):
    with pytest.raises((RecipeError, TypeError), match=why):
        values_of(entry)


def test_keys_are_written_as_in_toml():
    nested = {"train": {"lr": 0.1}, "model": {"encoders": {"a": {"kind": "mlp", "hidden": [4]}}}, "clients.num": 3}
    assert flat_keys(nested) == {
        "train.lr": 0.1,
        "model.encoders.a": {"kind": "mlp", "hidden": [4]},
        "clients.num": 3,
    }


def test_a_study_crosses_methods_with_scenarios_grids_and_conditions(tmp_path):
    found = cells(
        tmp_path,
        scenarios={"few": {"set": {"clients": {"num": 3}}}, "many": {"set": {"clients": {"num": 6}}}},
        grid={"train": {"lr": [0.1, 0.2]}},
        methods={"fedavg": {}, "fedprox": {"grid": {"algorithm": {"mu": [0.1, 1.0]}}}},
        when=[
            {"match": {"method": "fedprox", "train.lr": 0.2}, "skip": "too slow"},
            {"match": {"scenario": ["many"]}, "set": {"rounds": 3}, "unset": ["train.momentum"]},
        ],
    )
    assert [(c.scenario, c.label) for c in found[:3]] == [
        ("few", "fedavg lr=0.1"),
        ("few", "fedavg lr=0.2"),
        ("few", "fedprox lr=0.1 mu=0.1"),
    ]
    assert len(found) == 2 * (2 + 4)
    assert [c.label for c in found if c.skip and c.scenario == "few"] == [
        "fedprox lr=0.2 mu=0.1",
        "fedprox lr=0.2 mu=1",
    ]
    assert {(c.scenario, c.table["clients"]["num"], c.table["rounds"]) for c in found} == {
        ("few", 3, 2),
        ("many", 6, 3),
    }
    assert {c.table["engine"]["threads"] for c in found} == {1}


def test_the_options_of_a_recipe_stay_only_for_its_own_algorithm(tmp_path):
    recipe = tmp_path / "fedprox.toml"
    recipe.write_text(RECIPE.replace('name = "fedavg"', 'name = "fedprox"\nmu = 0.25'))
    study = {"recipe": str(recipe), "seeds": [1], "methods": {"fedprox": {}, "fedavg": {}, "moon": {}}}
    tables = {cell.method: cell.table["algorithm"] for cell in Planner(load_study(study)).cells()}
    own = {"name": "fedprox", "mu": 0.25}
    assert tables == {"fedprox": own, "fedavg": {"name": "fedavg"}, "moon": {"name": "moon"}}


def test_a_condition_changes_only_the_cells_that_it_matches(tmp_path):
    found = cells(
        tmp_path,
        scenarios={"one": {}, "two": {"set": {"rounds": 3}}},
        methods={"mine": {"set": {"algorithm": {"name": "fedprox", "mu": 0.5}}}},
        when=[{"match": {"scenario": "one"}, "set": {"algorithm": {"aggregation": "uniform"}}}],
    )
    assert {cell.scenario: cell.table["algorithm"] for cell in found} == {
        "one": {"name": "fedprox", "mu": 0.5, "aggregation": "uniform"},
        "two": {"name": "fedprox", "mu": 0.5},
    }


def test_all_problems_are_told_at_once(tmp_path):
    study = table(
        tmp_path,
        seeds=[1, 2],
        metric="globl.accuracy",
        methdos={},
        methods={"fedavg": {"sett": {}}, "fedprox": {"search": {"algorithm.mu": [0.1]}}},
        search={"trials": 0, "seeds": [2, 3]},
    )
    with pytest.raises(RecipeError) as told:
        load_study(study)
    text = str(told.value)
    assert "[methods.fedavg] has no option 'sett'; did you mean 'set'?" in text
    assert "no key or section 'methdos'; did you mean 'methods'?" in text
    assert "[search] trials = 0: must be 1 or more" in text


def test_problems_of_values_are_told_at_once(tmp_path):
    study = table(
        tmp_path,
        metric="globl.accuracy",
        grid={"train.lr": {"low": 1.0, "high": 0.1, "count": 2}},
        search={"trials": 2, "seeds": [2, 3]},
        when=[{"match": {"method": "fedprx"}, "set": {"rounds": 1}}, {"match": {"scenario": "recipe"}}],
    )
    with pytest.raises(RecipeError) as told:
        load_study(study)
    text = str(told.value)
    for part in (
        "5 problems",
        "[2] are reported seeds too",
        "[grid] train.lr: low = 1.0 must be below high = 0.1",
        "'globl.accuracy': write GROUP.NAME, as in 'global.accuracy'; did you mean 'global'?",
        "[[when]] 1: no method 'fedprx'; did you mean 'fedprox'?",
        "[[when]] 2 changes nothing",
    ):
        assert part in text


def test_problems_of_recipes_name_the_method_and_the_scenario_once(tmp_path):
    with pytest.raises(RecipeError) as told:
        cells(tmp_path, grid={"train.lrr": [0.1, 0.2]}, methods={"fedavg": {}, "fedporx": {}})
    text = str(told.value)
    assert "method 'fedavg' in scenario 'recipe' with train.lrr = 0.1 and 1 more: [train] has no option 'lrr'" in text
    assert "'fedporx' is no algorithm; did you mean 'fedprox'?" in text


def test_the_search_needs_validation_rows_and_both_ends_of_a_range_must_be_valid(tmp_path):
    search = {"trials": 2, "seeds": [9], "keys": {"train.lr": {"low": 0.01, "high": 0.1}}}
    with pytest.raises(RecipeError, match=r"the search needs validation rows: set clients\.validation"):
        cells(tmp_path, search=search, set={"clients.validation": 0.0})
    search["keys"] = {"train.momentum": {"low": 0.5, "high": 2.0}}
    with pytest.raises(RecipeError, match=r"\[train\] momentum = 2.0"):
        cells(tmp_path, search=search)


def test_a_run_has_the_same_name_for_the_same_content_and_another_for_another(tmp_path):
    study = load_study(table(tmp_path))
    planner = Planner(study)
    fedavg, fedprox = planner.cells()
    names = {
        planner.name(fedavg.recipe(1, {}, tuning=False)),
        planner.name(fedavg.recipe(2, {}, tuning=False)),
        planner.name(fedprox.recipe(1, {}, tuning=False)),
        planner.name(fedavg.recipe(1, {}, tuning=True)),
        planner.name(fedavg.recipe(1, {"train.lr": 0.1}, tuning=False)),
        planner.name(fedavg.recipe(1, {"data.snr.a": 2.0}, tuning=False)),
    }
    assert len(names) == 6
    again = fedavg.recipe(1, {"train.lr": 0.05, "checkpoint.every": 5}, tuning=False)  # 0.05 stands in the recipe
    assert planner.name(again) in names
    planner.fingerprints = {section: ("other data", True) for section in planner.fingerprints}
    assert planner.name(again) not in names


def test_a_whole_range_searches_whole_numbers():
    assert Range(low=1, high=8).is_whole
    assert not Range(low=1, high=8.0).is_whole


def test_all_models_that_an_algorithm_cannot_train_are_named_before_the_first_run(tmp_path):
    ogm = {"algorithm.name": "fedogm"}
    methods = {
        "fedavg": {},
        "fedogm": {},
        "again": {"set": ogm | {"algorithm.placebo": "constant"}},
        "searched": {"set": ogm, "search": {"algorithm.scale_params": ["all_weights", "conv4d"]}},
        "fits": {"set": ogm | {"algorithm.scale_params": "all_weights"}},
        "moon": {"set": {"evaluate.unimodal": "head", "model.fusion": "gated"}},
    }
    search = {"trials": 2, "seeds": [11], "keys": {"train.lr": [0.05]}}
    with pytest.raises(RecipeError) as refused:
        cells(tmp_path, methods=methods, search=search)
    text = str(refused.value)
    assert text.startswith("2 problems:\n  method 'fedogm' in scenario 'recipe' and 2 more: fedogm scales gradients")
    assert "the encoder of a, b has none to train; set [algorithm] scale_params = 'all_weights'" in text
    assert "method 'moon' in scenario 'recipe': [evaluate] unimodal = 'head'" in text
    assert "'fits'" not in text
    assert "'fedavg'" not in text
