"""What `polyfed check` suggests makes the next check pass: a law over policies and recipes."""

import itertools
import json
import re
import shlex
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyfed
from polyfed.cli.init import rules_in, write_recipe
from polyfed.core.errors import DataError, RecipeError
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.checks.check_result import Planned
from polyfed.experiment.evaluate import evaluate
from polyfed.experiment.recipes.first_recipe import starter
from polyfed.experiment.recipes.overrides import apply
from polyfed.experiment.recipes.recipe import load_recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.privacy.egress import announcement
from polyfed.privacy.egress.mixing import Mixing
from refusals import refuses, warned

RULES: dict[str, Any] = {"none": {}, "fitted": {"crp": "mean", "ward": "one-hot"}}
POLICIES: dict[str, Any] = {
    "a modality stays": {"stay": {"server": []}},
    "parameters only": {"*": {"server": ["parameters"]}},
    "nothing": {"*": {"server": []}, "shared": {"server": []}},
    "no statistic": {"lab": {"server": ["parameters", "gradients"]}, "shared": {"server": ["parameters"]}},
}
MLP = {"kind": "mlp", "hidden": [4]}
METHODS = ("fedavg", "fedproto")


def rows(folder: Path) -> str:
    draw = np.random.default_rng(1).integers(0, 3, 60)
    text = "".join(f"{'' if i % 7 == 0 else i % 5},{i % 4}.5,{'abc'[i % 3]},{draw[i]},{i % 4}\n" for i in range(60))
    (folder / "rows.csv").write_text("crp,age,ward,label,size\n" + text)
    return str(folder / "rows.csv")


def table_of(folder: Path, method: str, rules: str, policy: str) -> dict[str, Any]:
    ward = "ward" if RULES[rules] else "size"
    data = {"name": "table", "path": rows(folder), "modalities": {"lab": ["crp", "age"], "stay": [ward]}}
    data |= {"columns": RULES[rules], "partial": "absent"}
    return {
        "data": data,
        "clients": {"num": 2},
        "algorithm": {"name": method},
        "model": {"embedding": 4, "encoders": {"lab": MLP, "stay": MLP}},
        "egress": deepcopy(POLICIES[policy]),
    }


def refused(table: dict[str, Any]) -> list[Planned]:
    return [row for row in plan(assemble(parse_recipe(table))) if not row.allowed]


def allowed(table: dict[str, Any], text: str) -> None:
    """Write the policy rows of a text into a recipe."""
    for block, place, kinds in re.findall(r'\[egress\.("\*"|\w+)\] (\w+) = (\[[^]]*\])', text):
        table["egress"].setdefault(block.strip('"'), {})[place] = json.loads(kinds)


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
@pytest.mark.parametrize(("policy", "rules", "method"), [*itertools.product(POLICIES, RULES, METHODS)])
def test_what_check_suggests_makes_check_pass(
    policy: str, rules: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Mixing(frozenset(("lab", "stay")), "each reads both")  # as `mixing` finds, which takes seconds
    monkeypatch.setattr(announcement, "mixing", lambda *_: whole)
    table = table_of(tmp_path, method, rules, policy)
    found = check(parse_recipe(table))
    assert found.refused, "the policy forbids something"
    mended = deepcopy(table)
    for fix in found.fixes:
        allowed(mended, fix)
    assert not refused(mended)
    for why in found.why:
        kept = deepcopy(table)
        if private := re.search(r"private = (\[[^]]*\])", why):
            kept["algorithm"]["private"] = json.loads(private[1])
            allowed(kept, why)
            kept["clients"] |= {"personal_test": 0.2} if "personal_test = 0.2" in why else {}
            assert not refused(kept)
        if "that the recipe names" in why:
            stated = tomllib.loads(re.search(r"\[data\] (columns = .*) \(in Python", why)[1])  # type: ignore[index]
            for rule in stated["columns"].values():
                rule |= {"words": ["a", "b", "c"]} if "words" in rule else {}
            kept["data"]["columns"] |= stated["columns"]
            assert not [row for row in refused(kept) if row.task == "set-up"]


FILES = {
    "cp1252": ("cp1252", ";", ",", ""),
    "utf-16": ("utf-16", "\t", ".", ""),
    "bars": ("utf-8", "|", ".", ""),
    "semicolons": ("utf-8", ";", ",", ""),
    "a comment": ("utf-8", ";", ".", "#"),
    "latin-1": ("latin-1", ",", ".", ""),
}


def written(path: Path, encoding: str, separator: str, decimal: str, comment: str) -> None:
    marks = "\x81" if encoding == "latin-1" else "ü"  # a byte that cp1252 does not know
    lines = [f"# by hand, {i}" for i in range(2) if comment]
    lines += [separator.join(("alter", "größe", "klasse", "klinik"))]
    for i in range(40):
        cells = f"{i % 5}.5", f"{(i * 7) % 11}.25", "ab"[i % 2] + marks, f"K{i % 3}"
        lines.append(separator.join(cell.replace(".", decimal) for cell in cells))
    path.write_bytes("\n".join([*lines, ""]).encode(encoding))


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
@pytest.mark.parametrize("kind", FILES)
def test_the_way_to_read_a_file_that_init_proposes_works(kind: str, tmp_path: Path) -> None:
    options = {"label": "klasse", "client": "klinik"}
    written(tmp_path / "plain.csv", "utf-8", ",", ".", "")
    wanted = parse_recipe(tomllib.loads(starter(tmp_path / "plain.csv", options).text)).data.load()
    written(tmp_path / "odd.csv", *FILES[kind])
    with refuses(DataError, "add --set") as refused:
        starter(tmp_path / "odd.csv", options)
    told: dict[str, Any] = {}
    for word in shlex.split(str(refused.value).split("polyfed init: add ")[1].split("; in Python")[0]):
        if word != "--set":
            apply(told, word)
    found = parse_recipe(tomllib.loads(starter(tmp_path / "odd.csv", told["data"] | options).text)).data.load()
    assert {name: column.values.tolist() for name, column in found.modalities.items()} == {
        name: column.values.tolist() for name, column in wanted.modalities.items()
    }
    assert found.label.tolist() == wanted.label.tolist()


def test_ids_and_times_are_told_and_left_out_on_request(tmp_path: Path) -> None:
    lines = [f"{100 + 3 * i},{1.7e12 + i:.0f},{i % 7}.5,{i % 2}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["case_nr,time,hb,label", *lines, ""]))
    with warned("looks"):
        starter(tmp_path / "rows.csv", {})
    made = starter(tmp_path / "rows.csv", {"leave_out": ("case_nr", "time")}).text
    assert list(tomllib.loads(made)["data"]["modalities"].values()) == ["hb"]
    with refuses(RecipeError, "leave_out"):
        starter(tmp_path / "rows.csv", {"leave_out": ("tim",)})


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_labels_that_differ_by_blanks_are_refused_and_relabel_joins_them(tmp_path: Path) -> None:
    words = ["Yes", "No", "yes ", "no", "No"]
    lines = [f"{i % 7}.5,{words[i % 5]}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["hb,label", *lines, ""]))
    with refuses(DataError, "blanks") as refused:
        starter(tmp_path / "rows.csv", {})
    told = tomllib.loads(re.search(r"\[data\] (relabel = \{.*?\}) \(polyfed", str(refused.value))[1])  # type: ignore[index]
    recipe = parse_recipe(tomllib.loads(starter(tmp_path / "rows.csv", told).text))
    assert recipe.data.load().class_names == ("No", "Yes")
    with refuses(RecipeError, "data.relabel: allowed"):
        starter(tmp_path / "rows.csv", {"relabel": {"ja": "Yes"}})


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_new_rows_without_a_relabelled_word_are_scored(tmp_path: Path) -> None:
    def write(name: str, words: list[str]) -> Path:
        lines = [f"{i % 7}.5,{(i % 5) * 0.3},{words[i % len(words)]},p{i % 3}" for i in range(60)]
        (tmp_path / name).write_text("\n".join(["hb_a,hb_b,label,client", *lines, ""]))
        return tmp_path / name

    file = write("rows.csv", ["Yes", "No", "yes "])
    made = starter(file, {"relabel": {"yes ": "Yes"}}).text.replace("rounds = 20", "rounds = 1")
    polyfed.run(parse_recipe(tomllib.loads(made)), tmp_path / "run")
    scored = evaluate(tmp_path / "run", data=write("new.csv", ["Yes", "No"]))
    other = evaluate(tmp_path / "run", data=write("also.csv", ["yes ", "No"]))
    assert scored.content["pooled"]["rows"] == 60
    assert scored.content["pooled"] == other.content["pooled"]
    for new in ("new.csv", "also.csv"):
        pooled = evaluate(tmp_path / "run", data=tmp_path / new, groups={"label": []}).content["pooled"]
        assert {name: group["rows"] for name, group in pooled["groups"]["label"].items()} == {"No": 30, "Yes": 30}


NOTES = ("AZ reduziert, Angehörige informiert", "Entlassung geplant", "Pat. stabil; weiter wie bisher")
WARDS = ("Landkreis A", "St. Anna", "Not in universe", "Chirurgie")


@pytest.mark.parametrize(("words", "suggested"), [(NOTES, False), (WARDS, True)])
def test_one_hot_is_suggested_for_names_and_never_for_texts(
    words: tuple[str, ...], suggested: bool, tmp_path: Path
) -> None:
    lines = [f'{i % 7}.5,"{words[i % len(words)]}",{i % 2}' for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["hb,words,label", *lines, ""]))
    (note,) = [one for one in starter(tmp_path / "rows.csv", {}).notes if "hold texts" in one]
    assert ('words = "one-hot"' in note) is suggested
    if not suggested:
        with warned("holds texts"):
            starter(tmp_path / "rows.csv", {"columns": {"words": "one-hot"}})


def test_numbers_with_holes_get_the_mean_whatever_repeats(tmp_path: Path) -> None:
    lines = [f"{'' if i % 3 == 0 else i % 4},{i % 7}.5,{i % 2}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["crp,hb,label", *lines, ""]))
    with refuses(DataError, "columns = {"):
        starter(tmp_path / "rows.csv", {"modalities": {"lab": ["crp", "hb"]}})


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_a_clients_only_cell_is_not_told(tmp_path: Path) -> None:
    lines = [f"{7.25 if i == 0 else '' if i % 2 == 0 else i},{'ab'[i % 2]},{i // 2 % 2}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["crp,client,label", *lines, ""]))
    data = {
        "name": "table",
        "path": str(tmp_path / "rows.csv"),
        "modalities": {"lab": "crp"},
        "columns": {"crp": "mean"},
    }
    table = {"data": data | {"test_share": 0.0}, "clients": {"partition": "by-client"}, "algorithm": {"name": "fedavg"}}
    told = assemble(parse_recipe(table)).population.told
    assert [one["lab"]["crp"].count for one in told] == [0, 30]


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_in_short_says_what_leaves_before_the_first_round(tmp_path: Path) -> None:
    found = check(parse_recipe(table_of(tmp_path, "fedavg", "fitted", "parameters only") | {"egress": {}}))
    said = " ".join(str(found).split())
    assert "lab: before the first round, statistics of crp; then parameters only" in said
    assert "stay: before the first round, statistics of ward; then" in said
    assert "none in a first round" not in said


def test_init_takes_names_with_blanks_and_guesses_how_dates_are_written(tmp_path: Path) -> None:
    lines = [f"{'' if i % 9 == 0 else i % 4},{1 + i % 28:02}.03.2024,{i % 2}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["CRP mg/l,Aufnahme am,label", *lines, ""]))
    rules = rules_in(["CRP mg/l=mean", "Aufnahme am=date"])
    out = tmp_path / "recipe.toml"
    write_recipe(tmp_path / "rows.csv", out, {}, rules)
    dates = {"kind": "date", "start": "2000-01-01", "format": "%d.%m.%Y"}
    assert tomllib.loads(out.read_text())["data"]["columns"] == {"CRP mg/l": "mean", "Aufnahme am": dates}
    assert len(load_recipe(out).data.load()) == 60
    with refuses(RecipeError, "--force"):
        write_recipe(tmp_path / "rows.csv", out, {}, rules)
    with refuses(RecipeError, "takes options"):
        write_recipe(tmp_path / "rows.csv", out, {}, rules, overrides=["train.lr=1"], force=True)
    write_recipe(tmp_path / "rows.csv", out, {}, rules, overrides=["data.test_share=0.5"], force=True)
    assert load_recipe(out).data.test_share == 0.5


def test_whole_people_are_no_drawn_share(tmp_path: Path) -> None:
    lines = [f"{i % 7}.5,{i % 6},{i % 2}" for i in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["hb,client,label", *lines, ""]))
    made = tomllib.loads(starter(tmp_path / "rows.csv", {}).text)
    drawn = "no split is given"
    assert drawn in str(check(parse_recipe(made)))
    made["clients"]["test_clients"] = 0.3
    assert drawn not in str(check(parse_recipe(made)))
