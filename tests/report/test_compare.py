import json
import statistics
import tomllib

import pytest
import tomli_w

from polyfed.core.errors import DataError, RecipeError
from polyfed.report import compare
from polyfed.report.reading.run_folder import Folder
from refusals import refuses


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def test_runs_that_differ_only_in_seed_are_one_group(made_run):
    folders = [made_run(f"a{seed}", seed=seed) for seed in (1, 2, 3)]
    comparison = compare(folders)
    (group,) = comparison.groups
    accuracies = [result_of(folder)["metrics"]["global"]["accuracy"] for folder in folders]
    cell = group.cells["metrics.global.accuracy"]
    assert group.label == "fedavg"
    assert group.seeds == (1, 2, 3)
    assert cell.n == 3
    assert cell.mean == pytest.approx(statistics.mean(accuracies))
    assert cell.spread == pytest.approx(statistics.stdev(accuracies))


def test_groups_are_labelled_by_what_differs(made_run):
    folders = [made_run("a", mu=0.1), made_run("b", mu=0.01), made_run("c", mu=0.01, seed=2)]
    groups = compare(folders).groups
    assert [group.label for group in groups] == ["fedavg mu=0.1", "fedavg mu=0.01"]
    assert [len(group.folders) for group in groups] == [1, 2]


def test_options_of_one_name_in_two_sections_are_told_apart(made_run):
    folders = [made_run("a"), made_run("b")]
    for folder, (train, server) in zip(folders, ((0.1, 0.05), (0.05, 0.1)), strict=True):
        path = folder / "recipe.toml"
        path.write_text(path.read_text() + f"\n[train]\nlr = {train}\n[server]\nlr = {server}\n")
    assert [group.label for group in compare(folders).groups] == [
        "fedavg train.lr=0.1 server.lr=0.05",
        "fedavg train.lr=0.05 server.lr=0.1",
    ]


def test_spread_of_a_single_run_is_not_written(made_run):
    comparison = compare([made_run()])
    (group,) = comparison.groups
    assert all("±" not in comparison.cell(group, column) for column in comparison.columns)


def test_number_that_some_runs_lack_says_how_many_have_it(made_run):
    folders = [made_run("a", seed=1), made_run("b", seed=2)]
    result = result_of(folders[1])
    del result["metrics"]["personal"]
    (folders[1] / "result.json").write_text(json.dumps(result))
    comparison = compare(folders)
    column = next(c for c in comparison.columns if c.name == "metrics.personal.mean")
    assert comparison.cell(comparison.groups[0], column).endswith("(n=1)")


def test_folder_named_twice_counts_once(made_run):
    folder = made_run()
    comparison = compare([folder, folder / ".." / folder.name])
    assert len(comparison.groups[0].folders) == 1
    assert comparison.warnings == ()


def test_seed_that_occurs_twice_is_pointed_out(made_run):
    comparison = compare([made_run("a"), made_run("b")])
    assert "seed 1 occurs 2 times" in comparison.warnings[0]


def test_runs_on_other_data_are_pointed_out(made_run):
    folders = [made_run(f"a{seed}", seed=seed) for seed in (1, 2, 3)]
    for folder, sha in zip(folders, ("f00", "f00", "bad"), strict=True):
        facts = json.loads((folder / "run.json").read_text()) | {"data": {"sha256": sha}}
        (folder / "run.json").write_text(json.dumps(facts))
    assert compare(folders[:2]).warnings == ()
    (warning,) = compare(folders).warnings
    assert warning == "fedavg: not all runs have the same data; other rows or values in a3"


def test_versions_and_checkpoints_do_not_split_a_group(made_run):
    folders = [made_run("a", seed=1), made_run("b", seed=2)]
    recipe = folders[1] / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('polyfed = "0.0"', 'polyfed = "0.1"') + "\n[checkpoint]\nevery = 5\n")
    assert len(compare(folders).groups) == 1


def test_run_that_is_not_finished_is_refused(made_run):
    with refuses(DataError, "not finished"):
        compare([made_run(finished=False)])


def test_nothing_to_compare_is_an_error_of_the_call():
    with refuses(RecipeError, "needs folders"):
        compare([])


def test_scores_of_own_models_are_told_apart_from_those_of_a_global_model(made_run):
    folders = [made_run("a", seed=1), made_run("b", seed=2)]
    result = result_of(folders[0])
    result["metrics"]["global_by_client"] = {"mean": 0.5, "worst": 0.2}
    (folders[0] / "result.json").write_text(json.dumps(result))
    assert [text for text in compare(folders[:1]).warnings if "has no global model. The scores on the server's" in text]
    assert not [text for text in compare(folders[1:]).warnings if "global model" in text]


def test_the_folder_of_a_study_is_no_run(tmp_path):
    (tmp_path / "study.json").write_text("{}")
    with refuses(DataError, "holds a study"):
        Folder(tmp_path)


def run_of(made_run, name, **recipe):
    folder = made_run(name)
    written = tomllib.loads((folder / "recipe.toml").read_text())
    for section, entry in recipe.items():
        written[section] = entry if section == "rounds" else {**written.get(section, {}), **entry}
    (folder / "recipe.toml").write_text(tomli_w.dumps(written))
    return folder


def test_what_a_recipe_permits_is_no_part_of_a_methods_name(made_run):
    one = run_of(made_run, "one", algorithm={"name": "fedavg"}, egress={"a": {"server": ["parameters"]}})
    two = run_of(made_run, "two", algorithm={"name": "fedprox"}, egress={"a": {"server": []}}, limits={"min_rows": 3})
    assert [group.label for group in compare([one, two]).groups] == ["fedavg", "fedprox"]
    same = run_of(made_run, "same", algorithm={"name": "fedavg"}, egress={"a": {"server": []}})
    named = [group.label for group in compare([one, same]).groups]
    assert len(set(named)) == 2, "if nothing else differs, the permission is the name"


def test_different_models_in_one_table_are_said(made_run):
    one = run_of(made_run, "one", algorithm={"name": "fedavg"}, model={"embedding": 8})
    two = run_of(made_run, "two", algorithm={"name": "fedprox"}, model={"embedding": 64})
    (note,) = [text for text in compare([one, two]).warnings if "[model]" in text]
    assert "fedavg" in note
    assert "fedprox" in note
    again = run_of(made_run, "again", algorithm={"name": "fedprox"}, model={"embedding": 8})
    assert not [text for text in compare([one, again]).warnings if "[model]" in text]


def test_chosen_columns_and_no_others_are_in_every_form(made_run):
    comparison = compare([made_run("a", mu=0.1), made_run("b", mu=0.01)]).with_columns(["bytes_up", "global.acc*"])
    assert [column.name for column in comparison.columns] == ["bytes_up", "metrics.global.accuracy"]
    assert [column.heading for column in comparison.columns] == ["up", "accuracy %"]
    named = {"label", "n", "seeds", "bytes_up", "bytes_up.spread"}
    assert set(comparison.rows()[0]) == named | {"metrics.global.accuracy", "metrics.global.accuracy.spread"}


def test_a_column_that_no_run_has_suggests_similar_ones(made_run):
    with refuses(RecipeError, "bytes_up"):
        compare([made_run()]).with_columns(["bytes_upp", "rounds", "nothing"])
