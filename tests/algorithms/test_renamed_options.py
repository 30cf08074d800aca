"""Options that were renamed: an old recipe is refused with the new name."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest

from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import RecipeError
from polyfed.core.schema import checked
from polyfed.experiment.recipes.recipe import parse_recipe

RENAMED = [(name, old, new) for name, cls in ALGORITHMS.items() for old, new in getattr(cls, "renamed", {}).items()]


def table(name: str, **options: Any) -> dict[str, Any]:
    return {"data": {"name": "toy"}, "model": {"encoders": {}}, "algorithm": {"name": name, **options}}


@dataclass(frozen=True)
class Section:
    speed: int = 1

    renamed: ClassVar[dict[str, str]] = {"v": "speed"}


def test_a_section_names_the_new_word_and_still_reads_it() -> None:
    with pytest.raises(RecipeError, match=r"^\[part\] has no option 'v': it is now called 'speed'$"):
        checked("[part]", Section, {"v": 3})
    assert checked("[part]", Section, {"speed": 3}) == {"speed": 3}


def test_other_unknown_options_get_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"has no option 'sped'; did you mean 'speed'"):
        checked("[part]", Section, {"sped": 3})


def test_the_options_of_hfm_and_cmsfed_have_speaking_names() -> None:
    with pytest.raises(RecipeError, match=r"\[algorithm\] has no option 'q': it is now called 'local_rounds'"):
        parse_recipe(table("hfm", q=5))
    with pytest.raises(RecipeError, match=r"\[algorithm\] has no option 'chi': it is now called 'dominance_threshold'"):
        parse_recipe(table("cmsfed", chi=0.8))


@pytest.mark.parametrize(("name", "old", "new"), RENAMED)
def test_every_renamed_option_is_refused_with_an_option_that_exists(name: str, old: str, new: str) -> None:
    options = {f.name for f in fields(ALGORITHMS[name])}
    assert new in options
    assert old not in options
    with pytest.raises(RecipeError, match=f"has no option '{old}': it is now called '{new}'"):
        parse_recipe(table(name, **{old: 1}))
