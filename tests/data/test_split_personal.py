"""`split_personal` of a table, a frame and arrays keeps overlapping windows apart, and `polyfed init` uses it."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from polyfed.cli import main
from polyfed.core.errors import DataError, RecipeError
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.data.columns import GUARD, OWN_TEST, Columns
from polyfed.data.population.clients import ClientsSpec
from polyfed.data.population.population import populate
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.data.sources.own.table_files import Table
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.from_data import make_recipe
from polyfed.experiment.recipes.recipe import load_recipe, parse_recipe
from refusals import refuses, warned

MARKED = ClientsSpec(partition="by-client", num=None, personal_test="split_personal")


def windows() -> pd.DataFrame:
    """Windows of 2.56 s that begin every 1.28 s, of three persons and two activities."""
    place = np.arange(120)
    person, step = place // 40, place % 40
    held = pd.DataFrame({"acc_x": np.sin(place * 0.7), "acc_y": np.cos(place * 0.3)})
    words = np.where(step < 20, "sit", "walk").tolist()
    return held.assign(activity=words, person=[f"p{n}" for n in person], t_start=1.6e9 + 1000.0 * person + 1.28 * step)


def page() -> str:
    """Return the code of the page that marks test rows and guard rows."""
    text = (Path(__file__).parents[2] / "docs/partitions.md").read_text()
    found = re.search(r"```python\n(rows = .*?)```", text, re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    monkeypatch.chdir(tmp_path)
    windows().to_csv("windows.csv", index=False)
    exec(page(), {"pd": pd})
    return pd.read_csv("marked.csv")


def forms(rows: pd.DataFrame) -> dict[str, Any]:
    groups: dict[str, Any] = {"acc": ["acc_x", "acc_y"]}
    own = Table(path="marked.csv", modalities=groups, label="activity", client="person", test_share=0.0)
    renamed = rows.rename(columns={"split_personal": "part"})
    said = Given(labels="activity", clients="person", modalities=groups, test_share=0.0)
    arrays = {"acc": rows[["acc_x", "acc_y"]].to_numpy()}
    given = Given(labels=rows.activity.tolist(), clients=rows.person.tolist(), test_share=0.0)
    codes = rows.split_personal.to_numpy()
    return {
        "file": own.load(),
        "frame": table_of(rows, said),
        "another name": table_of(renamed, Given(**{**vars(said), "split_personal": "part"})),
        "arrays": table_of(arrays, Given(**{**vars(given), "split_personal": codes})),
        "splits": table_of({"train": rows}, said),
    }


def test_no_test_window_overlaps_a_training_window_in_any_form_of_the_data(marked: pd.DataFrame) -> None:
    start = marked.t_start.to_numpy()
    for form, columns in forms(marked).items():
        people = populate(columns, MARKED, 1)
        assert people.test is not None, form
        for k in range(3):
            train, own = (start[np.asarray(rows)] for rows in (people.train[k], people.test[k]))
            assert len(own) == 10, form
            assert len(train) >= 24, form
            assert np.abs(own[:, None] - train).min() > 2.5, form
        assert {*np.unique(marked.split_personal)} == {0, OWN_TEST, GUARD}


def test_init_takes_the_marked_rows_and_no_input_of_them(marked: pd.DataFrame, tmp_path: Path) -> None:
    arrays = {"acc": marked[["acc_x", "acc_y"]].to_numpy(), "label": np.array(marked.activity.tolist())}
    codes = marked.split_personal.to_numpy()
    np.savez("marked.npz", **arrays, client=np.array(marked.person.tolist()), split_personal=codes)
    for file, left in (("marked.csv", ["t_start"]), ("marked.npz", [])):
        made = starter(Path(file), {"leave_out": left})
        recipe = parse_recipe(parse_toml(made.text))
        assert recipe.clients.personal_test == "split_personal", file
        assert recipe.clients.personal_validation == 0.0, file
        assert [*recipe.model.encoders] == ["acc"], file
        columns = recipe.data.load()
        assert int((columns.split != 0).sum()) == 0, file
        assert any("30 test rows" in note and "guard rows" in note for note in made.notes), file
        assert not any("drawn as the test set" in note for note in (*made.notes, *columns.notes)), file
    shutil.copy("marked.csv", "again.csv")
    with refuses(DataError, "split within a"):
        starter(Path("again.csv"), {"modalities": {"acc": ["acc_x", "split_personal"]}})


def test_init_warns_if_rows_in_time_are_drawn_at_random(marked: pd.DataFrame) -> None:
    for name in ("t_start", "onset"):
        windows().rename(columns={"t_start": name}).to_csv("windows.csv", index=False)
        with warned("split_personal"):
            starter(Path("windows.csv"), {"leave_out": [name]})
    held = windows()
    np.savez(
        "windows.npz",
        acc=held[["acc_x", "acc_y"]].to_numpy(),
        label=np.array(held.activity.tolist()),
        client=np.array(held.person.tolist()),
        t_start=held.t_start.to_numpy(),
    )
    with warned("split_personal"):
        starter(Path("windows.npz"), {"leave_out": ["t_start"]})
    windows().drop(columns="t_start").to_csv("timeless.csv", index=False)
    starter(Path("timeless.csv"), {})  # without a warning, which would be an error here


def test_random_rows_of_data_with_guard_rows_are_warned_of(marked: pd.DataFrame) -> None:
    columns = forms(marked)["file"]
    with warned("guard rows"):
        populate(columns, ClientsSpec(partition="by-client", num=None, personal_test=0.25), 1)


def test_marks_that_are_missing_or_wrong_are_refused(marked: pd.DataFrame) -> None:
    with refuses(DataError, "no column 'parts'"):
        Table(path="marked.csv", modalities={"acc": "acc_*"}, label="activity", split_personal="parts").load()
    marked.assign(split_personal=7).to_csv("wrong.csv", index=False)
    with refuses(DataError, "guard row"):
        Table(path="wrong.csv", modalities={"acc": "acc_*"}, label="activity", client="person").load()
    with refuses(RecipeError, "split_personal"):
        make_recipe("marked.csv", labels="activity", split_personal=np.zeros(120, int))


def beside(columns: Columns, kept: np.ndarray, held: np.ndarray, guard: int) -> int:
    """The rows of `kept` that stand within `guard` rows of a row of `held`, in the order of each natural client."""
    client, split = columns.client.numpy(), columns.split.numpy()
    count = 0
    for person in np.unique(client):
        order = np.flatnonzero((client == person) & (split == 0))
        mine, theirs = (np.flatnonzero(np.isin(order, rows)) for rows in (kept, held))
        if len(mine) and len(theirs):
            count += int((np.abs(mine[:, None] - theirs).min(1) <= guard).sum())
    return count


HELD = [
    {"personal_test": 0.25},
    {"validation": 0.2},
    {"personal_validation": 0.3},
    {"personal_test": 0.25, "personal_validation": 0.2},
    {"personal_test": 0.3, "validation": 0.2, "measure_on": "validation"},
    {"personal_test": "matched", "validation": 0.2},
]


@pytest.mark.parametrize("guard", [0, 1, 3])
@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("partition", ["by-client", "iid", "dirichlet", "silos"])
def test_blocks_have_their_size_and_no_training_row_beside_them(
    table: Any, partition: str, held: dict[str, Any], guard: int
) -> None:
    if partition == "silos" and "personal_validation" in held:
        pytest.skip("silos have no such rows")
    num = {} if partition in ("by-client", "silos") else {"num": 3}
    columns = table()
    spec = ClientsSpec(partition=partition, **num, row_split="blocks", guard_rows=guard, min_size=1, **held)
    people, again = (populate(columns, spec, key) for key in (1, 2))
    train = np.unique(people.train.rows.numpy())
    own = [] if people.test is None else [np.unique(people.test.rows.numpy())]
    pooled = people.validation_rows.numpy() if people.own_validation is None else people.own_validation.rows.numpy()
    parts = [*(own if held.get("personal_test") != "matched" else []), np.unique(pooled)]
    parts = [part for part in parts if len(part)]
    assert parts
    for part in parts:
        assert not np.isin(part, train).any()
        assert beside(columns, train, part, guard) == 0
    assert np.array_equal(train, np.unique(again.train.rows.numpy())), "blocks are not drawn"
    if guard == 0 and "personal_test" in held and len(held) == 1:
        sizes = np.bincount(columns.client[columns.split == 0])
        assert len(parts[0]) == sum(int(0.25 * size) for size in sizes)


def test_a_block_is_the_end_of_each_class_of_each_client() -> None:
    held = windows()
    arrays = {"acc": held[["acc_x", "acc_y"]].to_numpy()}
    given = Given(labels=held.activity.tolist(), clients=held.person.tolist(), test_share=0.0)
    people = populate(table_of(arrays, given), BLOCKS, 1)
    assert people.test is not None
    for k in range(3):
        assert (np.asarray(people.test[k]) - 40 * k).tolist() == [*range(15, 20), *range(35, 40)]
        assert {*range(40)} - {*(np.asarray(people.train[k]) - 40 * k).tolist()} == {*range(14, 21), *range(34, 40)}
    assert any("5 rows beside" in note or "9 rows beside" in note for note in people.columns.notes)


BLOCKS = ClientsSpec(partition="by-client", num=None, personal_test=0.25, row_split="blocks")


def test_no_block_overlaps_a_training_window_in_any_form_of_the_data(marked: pd.DataFrame) -> None:
    start, rows = marked.t_start.to_numpy(), marked.drop(columns="split_personal")
    rows.to_parquet("plain.parquet")
    given = Given(labels="activity", clients="person", modalities={"acc": ["acc_x", "acc_y"]}, test_share=0.0)
    file = Table(path="plain.parquet", modalities={"acc": "acc_*"}, label="activity", client="person", test_share=0.0)
    for columns in (table_of(rows, given), table_of({"train": rows}, given), file.load()):
        people = populate(columns, BLOCKS, 1)
        assert people.test is not None
        for k in range(3):
            train, own = (start[np.asarray(part)] for part in (people.train[k], people.test[k]))
            assert np.abs(own[:, None] - train).min() > 2.5
        assert len(people.test_rows) == 30, "without another test set, the blocks are that of the server"


def test_init_writes_blocks_as_it_advises(marked: pd.DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, warned("clients.row_split=blocks") as told:
        main(["init", "windows.csv", "--leave-out", "t_start"])
    assert not ended.value.code
    capsys.readouterr()
    (command,) = re.findall(r"and class: polyfed (init .*?); or mark", str(told[0].message))
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command))
    assert not ended.value.code, capsys.readouterr().err
    made = load_recipe(Path("recipe.toml"))
    assert (made.clients.row_split, made.clients.personal_test, made.data.test_share) == ("blocks", 0.2, 0.0)
    assert "drawn as the test set" not in capsys.readouterr().out
    assert len(populate(made.data.load(), made.clients, 1).test_rows) == 24


def test_the_recipe_of_windows_holds_out_blocks() -> None:
    made = load_recipe(Path(__file__).parents[2] / "recipes/fedproto-ucihar.toml")
    assert made.clients.row_split == "blocks"


def test_a_block_beside_test_rows_that_the_data_marks_leaves_out_none_of_them(table: Any) -> None:
    columns = table()
    marks = torch.zeros(len(columns), dtype=torch.int8)
    client = columns.client.cpu()
    for number in client.unique():  # the last rows of each client are its test rows
        marks[(client == number).nonzero()[-3:, 0]] = 1
    columns = dataclasses.replace(columns, split_personal=marks, split=torch.zeros_like(columns.split))
    spec = ClientsSpec(partition="by-client", personal_test="split_personal", validation=0.2, row_split="blocks")
    people = populate(columns, spec, 1)
    assert people.test is not None
    assert people.test.rows.sort().values.tolist() == (marks == 1).nonzero()[:, 0].tolist()
    held = people.validation_rows.numpy()
    assert len(held)
    assert beside(columns, np.unique(people.train.rows.numpy()), held, 1) == 0
    assert beside(columns, people.test.rows.numpy(), held, 1) == 0
