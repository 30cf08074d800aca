"""The recipes that come with polyfed."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.system.files import shipped

_SUFFIX = ".toml"


def names() -> list[str]:
    """The names of the recipes, sorted: the names of their files without `.toml`."""
    return sorted(path.stem for path in shipped("recipes").glob(f"*{_SUFFIX}"))


def path_of(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: the name, with or without `.toml`.

    Raises:
        RecipeError: no recipe has this name; the message suggests a similar one.
    """
    plain = name.removesuffix(_SUFFIX)
    if plain not in names():
        raise RecipeError(f"no recipe '{name}' comes with polyfed; {did_you_mean(plain, names())}")
    return shipped("recipes") / f"{plain}{_SUFFIX}"


def text_of(name: str) -> str:
    """The text of a recipe; see `path_of` for errors."""
    return path_of(name).read_text(encoding="utf-8")


def headline(name: str) -> str:
    """The first sentence of the comment at the top of a recipe."""
    comment = " ".join(_comment_lines(text_of(name)))
    return re.split(r"(?<=\.)(?<!al\.)\s(?=[A-Z])", comment, maxsplit=1)[0]


def copy_recipes(chosen: Sequence[str], folder: Path) -> list[Path]:
    """Copy recipes into a folder, which is made if it does not exist. No file is overwritten.

    Raises:
        RecipeError: a recipe does not exist, or the folder already has a file of this name. Nothing was copied then.
    """
    texts = {folder / path_of(name).name: text_of(name) for name in chosen}
    taken = [str(path) for path in texts if os.path.lexists(path)]
    if taken:
        raise RecipeError(f"{', '.join(taken)} exists already. Move or rename it, or copy in another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return list(texts)


def _comment_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
