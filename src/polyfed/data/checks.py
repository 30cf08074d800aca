"""A function that checks a value of a recipe. The schemas of `[data]` and of `[clients]` both use it."""

from polyfed.core.errors import RecipeError


def require(ok: bool, where: str, value: object, allowed: str) -> None:
    """Check a value of a recipe.

    Args:
        ok: Whether the value is allowed.
        where: The recipe key, such as `data.modalities`.
        value: The value.
        allowed: What is allowed, in words.

    Raises:
        RecipeError: `ok` is false; the message contains the other three arguments.
    """
    if not ok:
        raise RecipeError(f"{where} = {value!r}; allowed: {allowed}", tuple(where.split(".")))
