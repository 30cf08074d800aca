"""A recipe with many faults tells of all of them at once, each with its line or its override."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import polyfed
from polyfed.core.errors import DataError, EgressError, NotAllowed, RecipeError
from polyfed.core.problems import joined
from refusals import refuses

BAD = """seed = 1
roundz = 3

[data]
name = "toy"
shapez = 3

[model]
embedding = 0
[model.encoders]
audio = { kind = "mpl" }
text.kind = "mlp"
text.hidden = [
  0,
]

[clients]
num = 0
partition = "dirichlett"

[train]
lr = "fast"
batch_size = -3

[server]
lr = 2.0

[algorithm]
name = "local"
mu = 3

[egress]
audio = 3
"""

EXPECTED = {
    "line 2": "no section or key 'roundz'; did you mean 'rounds'",
    "line 6": "[data] has no option 'shapez'; did you mean 'shapes'",
    "line 9": "[model] embedding = 0",
    "line 11": "[model.encoders] audio.kind = 'mpl': did you mean 'mlp'",
    "line 12": "[model.encoders] text: hidden = 0",
    "line 18": "[clients] num = 0: must be 1 or more",
    "line 19": "clients.partition = 'dirichlett' is unknown; did you mean 'dirichlet'",
    "line 22": "[train] lr = 'fast': must be a number",
    "line 23": "[train] batch_size = -3: must be 0 or more",
    "line 25": "[server] has no effect: algorithm 'local' does not use it",
    "line 30": "[algorithm] has no option 'mu'",
    "line 33": "[egress] audio = 3: write [egress.audio]",
    "--set train.momentum=x": "[train] momentum = 'x': must be a number",
}


def test_every_fault_has_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(BAD)
    with pytest.raises(RecipeError) as caught:
        polyfed.load_recipe(tmp_path / "r.toml", ["train.momentum=x"])
    head, *lines = str(caught.value).splitlines()
    assert head.endswith(f"{len(EXPECTED)} problems:")
    assert "r.toml" in head
    for line, (place, words) in zip(lines, EXPECTED.items(), strict=True):
        assert line.startswith(f"  {place}: {words}"), line


def test_one_fault_keeps_its_text_and_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[data]\nname = "toy"\n[algorithm]\nname = "fedavg"\n[train]\nlr = "x"\n')
    with refuses(RecipeError, "train.lr: r.toml"):
        polyfed.load_recipe(tmp_path / "r.toml")


def test_missing_sections_and_wrong_overrides_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[train]\nlr = -1.0\n")
    with pytest.raises(RecipeError) as caught:
        polyfed.load_recipe(tmp_path / "r.toml")
    for words in ("section [data] is missing", "section [algorithm] is missing", "line 2: [train] lr = -1.0"):
        assert words in str(caught.value)
    with refuses(RecipeError, "--set a") as refused:
        polyfed.load_recipe(tmp_path / "r.toml", ["a", "b"])
    assert len(refused.value.several) == 2


def test_what_is_not_allowed_comes_alone() -> None:
    found = joined([RecipeError("one"), NotAllowed("two"), NotAllowed("three")])
    assert isinstance(found, NotAllowed)
    assert "one" not in str(found)
    mixed = joined([RecipeError("one"), DataError("two")])
    assert type(mixed) is RecipeError
    assert [str(error) for error in mixed.several] == ["one", "two"]
    assert joined([DataError("one"), DataError("one")]).several == ()


def test_faults_of_an_npz_are_told_at_once(tmp_path: Path) -> None:
    arrays = {"a": np.array([["x"]] * 6), "b": np.zeros(6), "label": np.arange(6) % 2, "client": np.zeros((6, 2))}
    np.savez(tmp_path / "d.npz", **arrays)
    recipe = polyfed.parse_recipe(
        {
            "data": {"name": "npz", "path": str(tmp_path / "d.npz"), "modalities": ["a", "b", "c"]},
            "algorithm": {"name": "fedavg"},
        }
    )
    with pytest.raises(DataError) as caught:
        polyfed.check(recipe)
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems:"
    for word, line in zip(("'a'", "'b'", "'c'", "'client'"), lines[1:], strict=True):
        assert word in line


PARTIAL = """seed = 1
rounds = 1
[data]
name = "toy"
rows = 60
shapes = { a = [4], b = [4], c = [4] }
[clients]
num = 2
[train]
lr = 0.1
[model.encoders]
a = { kind = "token-transformer", vocabulary = 9 }
[algorithm]
name = "partialfl"
"""


def test_a_method_tells_of_its_own_faults_with_all_others(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(PARTIAL)
    with pytest.raises(RecipeError) as refused:
        polyfed.check(tmp_path / "mine.toml")
    said = str(refused.value)
    for words in ("ids from 0 to 8", "partialfl shares nothing", "[model] head = [128]"):
        assert words in said, said
    more = PARTIAL.partition("[model.encoders]")[0] + '[model]\nhead = [8]\n[algorithm]\nname = "partialfl"\n'
    row = said.partition("as in [egress.c] ")[2].splitlines()[0]
    (tmp_path / "mine.toml").write_text(f"{more}[egress.c]\n{row}\n")
    assert polyfed.check(tmp_path / "mine.toml").exit_code == 0
    wrong = more.replace('"partialfl"', '"partialfl"\nlocal_encoders.b = { kind = "mlp" }')
    wrong = f"{wrong.replace('head = [8]', 'embedding = 8')}[egress.c]\n{row}\n"
    (tmp_path / "mine.toml").write_text(wrong)
    with pytest.raises(RecipeError) as refused:
        polyfed.check(tmp_path / "mine.toml")
    for words in ("local_encoders names 'b'", "[model] head"):
        assert words in str(refused.value), str(refused.value)
    impossible = wrong.replace("local_encoders", "probe = true\nlocal_encoders")
    (tmp_path / "mine.toml").write_text(f"{impossible}[task]\nname = 'retrieval'\n")
    with pytest.raises(RecipeError) as refused:  # before any data is read
        polyfed.check(tmp_path / "mine.toml")
    assert {fault.key for fault in refused.value.several} == {("algorithm", "probe"), ("task", "name")}


def test_one_cause_is_one_line_and_one_row_stands_for_all_modalities() -> None:
    recipe = polyfed.make_recipe(
        {m: np.ones((60, 3)) * np.arange(60)[:, None] for m in "abc"},
        labels=np.arange(60) % 3,
        clients=2,
        algorithm="fedproto",
        standardise=True,
    )
    with pytest.raises(EgressError) as refused:
        polyfed.run(recipe)
    lines = str(refused.value).splitlines()
    causes = [line for line in lines if line.startswith("  prototypes of ")]
    assert [cause.split()[2] for cause in causes] == ["a", "b", "c"]
    fixes = lines[lines.index("it would leave if the policy said:") + 1 :]
    kinds = '["parameters", "gradients", "prototypes", "statistic"]'
    assert fixes == [f'  [egress."*"] server = {kinds}']
    row = {"*": {"server": ["parameters", "gradients", "prototypes", "statistic"]}}
    assert polyfed.check(replace(recipe, egress=row)).exit_code == 0


def test_a_wrong_option_is_no_fault_of_the_option_that_needs_it() -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}}
    with refuses(RecipeError, "train.momentum: must be") as refused:
        polyfed.parse_recipe(table | {"train": {"momentum": 2.0, "nesterov": True}})
    assert not refused.value.several, "momentum is above 0, so nesterov has what it needs"
    with refuses(RecipeError, "train.nesterov: needs momentum"):
        polyfed.parse_recipe(table | {"train": {"nesterov": True}})


def test_all_limits_that_a_recipe_breaks_are_told() -> None:
    table = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "train": {"batch_size": 2, "steps": 1}}
    with refuses(RecipeError, "limits: min_batch_size") as refused:
        polyfed.parse_recipe(table | {"limits": {"min_batch_size": 8, "min_steps": 3}})
    assert len(refused.value.several) == 2
