"""What a study may say, and that all that is wrong with it is told at once."""

import copy
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path

import pytest
from study_world import RECIPE, refused, table

from polyfed.core.errors import RecipeError
from polyfed.experiment.study.plan import planned, quiet
from polyfed.experiment.study.ranges import MOST_VALUES, Range, flat_keys, grid_size, values_of
from polyfed.experiment.study.study_file import parse_study
from polyfed.training.optimisers import Train
from refusals import refuses


def cells(folder: Path, **changes):
    return planned(table(folder, **changes))[1]


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
        ({"low": 0.0, "high": 1.0, "scale": "log"}, "0 with scale"),
        ({"low": 0.0, "high": 1.0}, "give count"),
        ({"low": 0.0, "high": 1.0, "step": 0.5, "count": 3}, "not both"),
        ({"low": 0.0, "hihg": 1.0}, "hihg: mean 'high'"),
        ([], "list of values"),
        ([1, 2, 1], "a value twice"),
        (0.1, "list of values"),
    ],
)
def test_a_range_that_says_nothing_is_refused(entry, why):
    with refuses((RecipeError, TypeError), why):
        values_of(entry)


HOSTILE = [
    None,
    -1,
    10**30,
    float("nan"),
    float("inf"),
    "x" * 10_000,
    "../../etc/passwd",
    "a\0b",
    [],
    [[]],
    [float("nan")] * 2,
    {},
    {"low": 0},
    {"low": 0, "high": 10**15},
    {"low": 0, "high": 10**400},
    {"low": 0.0, "high": 1.0, "step": 1e-320},
    {"low": 0.0, "high": 1.0, "count": 10**12},
    {"low": 1, "high": float("inf")},
    {"a": {"b": {"c": 1}}},
    list(range(20_000)),
]


def places(entry, at=()):
    """The path to every value of nested tables and lists."""
    for key, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


@pytest.mark.timeout(300)
def test_a_hostile_value_at_any_place_ends_in_words_and_takes_neither_memory_nor_time(tmp_path):
    study = table(
        tmp_path,
        scenarios={"few": {"set": {"clients": {"num": 3}}}},
        grid={"train": {"lr": [0.1, 0.2]}},
        methods={
            "fedavg": {"search": {"train": {"momentum": [0.1, 0.5]}}},
            "fedprox": {"grid": {"algorithm": {"mu": [0.1, 1.0]}}, "settings_of": "fedavg"},
        },
        search={"trials": 2, "seeds": [7], "keys": {"train": {"weight_decay": {"low": 0.0, "high": 0.1}}}},
        when=[{"match": {"method": "fedprox", "train.lr": 0.2}, "skip": "too slow"}],
    )
    everywhere = list(places(study))
    assert len(everywhere) > 30
    for *above, last in everywhere:
        for value in HOSTILE:
            changed = copy.deepcopy(study)
            place = changed
            for key in above:
                place = place[key]
            place[last] = value
            problems = []
            parsed = parse_study(changed, problems, folder=tmp_path)
            assert problems or parsed is not None
            assert parsed is None or all(grid_size(parsed.grid_of(name)) <= MOST_VALUES for name in parsed.methods)


def test_a_grid_of_too_many_runs_is_refused_before_any_is_planned(tmp_path):
    told = refused(table(tmp_path, grid={"train": {"lr": {"low": 1, "high": 200}}, "seed": {"low": 1, "high": 200}}))
    assert "the grid of 'fedavg': there are 40000 values, and at most 10000 are possible" in told


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
    tables = {cell.method: cell.table["algorithm"] for cell in planned(study)[1]}
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


def test_a_condition_that_never_holds_or_changes_a_searched_key_is_refused(tmp_path):
    rules = [
        {"match": {"methd": "fedavg"}, "set": {"rounds": 1}},
        {"match": {"clients.participaton": 6}, "set": {"rounds": 1}},
    ]
    text = refused(table(tmp_path, when=rules))
    assert "[[when]] 1 match: no recipe of the study sets 'methd'; did you mean 'method'?" in text
    assert "[[when]] 2 match: no recipe of the study sets 'clients.participaton'" in text
    search = {"trials": 2, "seeds": [9], "keys": {"train.lr": {"low": 0.01, "high": 0.1}}}
    for change in ({"set": {"train.lr": 0.5}}, {"unset": ["train.lr"]}):
        with refuses(RecipeError, "changes train.lr"):
            cells(tmp_path, search=search, when=[{"match": {"method": "fedavg"}} | change])
    whole = [{"match": {"method": "fedprox"}, "set": {"algorithm": {"name": "fedprox", "mu": 0.5}}}]
    methods = {"fedprox": {"search": {"algorithm.mu": [0.1, 1.0]}}}
    text = refused(table(tmp_path, methods=methods, search={"trials": 2, "seeds": [9]}, when=whole))
    assert "[[when]] 1 changes algorithm.mu, but a search chooses its value" in text


def test_all_problems_are_told_at_once(tmp_path):
    study = table(
        tmp_path,
        seeds=[1, 2],
        metric="globl.accuracy",
        methdos={},
        methods={"fedavg": {"sett": {}}, "fedprox": {"search": {"algorithm.mu": [0.1]}}},
        search={"trials": 0, "seeds": [2, 3]},
    )
    text = refused(study)
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
    text = refused(study)
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
    text = refused(table(tmp_path, grid={"train.lrr": [0.1, 0.2]}, methods={"fedavg": {}, "fedporx": {}}))
    assert "method 'fedavg' in scenario 'recipe' with train.lrr = 0.1 and 1 more: [train] has no option 'lrr'" in text
    assert "'fedporx' is no algorithm; did you mean 'fedprox'?" in text


def test_the_search_needs_validation_rows_and_both_ends_of_a_range_must_be_valid(tmp_path):
    search = {"trials": 2, "seeds": [9], "keys": {"train.lr": {"low": 0.01, "high": 0.1}}}
    with refuses(RecipeError, "search needs validation"):
        cells(tmp_path, search=search, set={"clients.validation": 0.0})
    search["keys"] = {"train.momentum": {"low": 0.5, "high": 2.0}}
    with refuses(RecipeError, "including"):
        cells(tmp_path, search=search)


def test_a_run_has_the_same_name_for_the_same_content_and_another_for_another(tmp_path):
    planner, (fedavg, fedprox) = planned(table(tmp_path))
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


@pytest.mark.parametrize(("default", "used"), [(False, True), ("", "a"), ("none", "a"), (0.0, 0.5), ((), ("a",))])
def test_an_option_of_a_later_version_changes_no_name_until_a_recipe_uses_it(tmp_path, monkeypatch, default, used):
    planner, (fedavg, _) = planned(table(tmp_path))
    recipe = fedavg.recipe(1, {}, tuning=False)
    before = planner.name(recipe)
    later = make_dataclass(
        "Later", [("later", object, field(default=default))], bases=(Train,), frozen=True, kw_only=True
    )
    now = quiet(recipe).algorithm
    train = {f.name: getattr(now.train, f.name) for f in fields(Train)}

    def name_with(value):
        made = replace(quiet(recipe), algorithm=replace(now, train=later(**train, later=value)))
        with monkeypatch.context() as patch:
            patch.setattr("polyfed.experiment.study.plan.quiet", lambda _: made)
            return planner.name(recipe)

    assert name_with(default) == before
    assert name_with(used) != before


def test_a_whole_range_searches_whole_numbers():
    assert Range(low=1, high=8).is_whole
    assert not Range(low=1, high=8.0).is_whole


def test_faults_of_the_file_hide_no_faults_of_its_recipes(tmp_path):
    study = table(
        tmp_path,
        set={"clients": {"validation": 0.0}},
        methods={"moon": {"search": {"train.lrr": [0.1]}}, "fedporx": {}, "fedavg": {"grid": {"train.lr": []}}},
        search={"trials": 1, "seeds": [2], "samplr": "tpe"},
    )
    text = refused(study)
    for part in (
        "6 problems",
        "[search] has no option 'samplr'; did you mean 'sampler'?",
        "[2] are reported seeds too",
        "[methods.fedavg] grid train.lr: [] must be a list of values",
        "method 'moon' in scenario 'recipe': [train] has no option 'lrr'",
        "method 'moon' in scenario 'recipe': the search needs validation rows",
        "'fedporx' is no algorithm; did you mean 'fedprox'?",
    ):
        assert part in text


def test_a_metric_that_a_method_will_not_have_is_refused_before_any_run(tmp_path):
    text = refused(table(tmp_path, metric="global.acuracy"))
    assert "'fedavg' in scenario 'recipe' and 1 more: metric = 'global.acuracy': its runs do not measure it" in text
    assert "did you mean 'global.accuracy'?" in text
    assert "[[when]]" not in text
    text = refused(table(tmp_path, metric="personal.mean", methods={"fedavg": {}}))
    assert "For personal metrics, give clients test rows of their own" in text
    for metric in ("mae", "pearson", "weighted_kappa"):
        text = refused(table(tmp_path, metric=f"global.{metric}", methods={"fedavg": {}}))
        assert f"metric = 'global.{metric}': its runs do not measure it" in text
    own = {"fedavg": {}, "pfmml": {}}
    assert "'pfmml' in scenario 'recipe': metric = 'global.accuracy': its runs have no score" in refused(
        table(tmp_path, methods=own)
    )
    text = refused(table(tmp_path, methods=own, set={"clients.personal_test": 0.2}))
    assert (
        "'pfmml' in scenario 'recipe': metric = 'global.accuracy': its runs do not measure it; Allowed: personal.mean"
        in text
    )
    assert "To leave these runs out of the study, add a [[when]] with skip" in text
    assert "'fedavg'" not in text


def test_a_list_of_metrics_needs_one_that_each_method_has_and_no_misspelt_name(tmp_path):
    methods = {"fedavg": {}, "local": {}}
    assert len(cells(tmp_path, methods=methods, metric=["global_by_client.weighted", "global.accuracy"])) == 2
    text = refused(table(tmp_path, methods=methods, metric=["global_by_client.wieghted", "global.accuracy"]))
    assert "metric = 'global_by_client.wieghted': no run measures it; did you mean 'global_by_client.weighted'?" in text


def test_metrics_that_may_be_undefined_before_training_are_not_refused(tmp_path):
    assert cells(tmp_path, metric="global.auroc", set={"task": {"name": "classification", "ranking": True}})
    made = {"data": {"name": "objective.made:Made"}, "clients.partition": "by-client", "clients.personal_test": 0.3}
    for metric in ("global.pearson", "personal.pooled_r2", "personal.mean"):
        assert cells(tmp_path, metric=metric, set=made, unset=["clients.num"])


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
