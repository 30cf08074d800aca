"""`split_personal` of a table, a frame and arrays keeps overlapping windows apart, and `polyfed init` uses it."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from polyfed.core.errors import DataError, RecipeError
from polyfed.core.system.json_and_toml import parse_toml
from polyfed.data.columns import GUARD, OWN_TEST
from polyfed.data.population.clients import ClientsSpec
from polyfed.data.population.population import populate
from polyfed.data.reading.given import Given
from polyfed.data.reading.objects import table_of
from polyfed.data.sources.own.table_files import Table
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.from_data import make_recipe
from polyfed.experiment.recipes.recipe import parse_recipe
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
