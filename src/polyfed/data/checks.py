"""Small checks that the schemas of the data and clients sections share."""

from polyfed.core.errors import RecipeError


def need(ok: bool, where: str, value: object, allowed: str) -> None:
    """Raise RecipeError naming the recipe key, what was given and what is allowed, unless `ok`."""
    if not ok:
        raise RecipeError(f"{where} = {value!r}; allowed: {allowed}")
