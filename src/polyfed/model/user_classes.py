"""The user's own classes in `[model]`: a fusion, or a whole module."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from polyfed.core.errors import ModelError, NotAllowed, RecipeError
from polyfed.core.option_checks import key_of
from polyfed.core.registry import check_import, own
from polyfed.model.fusion import FUSIONS, Fusion


def read(where: str, given: Any, base: type, otherwise: str) -> Any:
    """Read an option that names a user's class, and check, on a device, that the class may be imported.

    Args:
        where: the option, for error texts.
        given: the class itself, or its path `package.module:Class`. If `base` is `nn.Module`, `given` may also be an
            instance of the class.
        base: the base class that the user's class must extend.
        otherwise: the other values that the option allows, for error texts.

    Returns:
        If `given` is a class that can be imported from its path, the path is returned. In all other cases, `given` is
        returned unchanged. It is then a path, an instance, or a class that cannot be imported.

    Raises:
        NotAllowed: the owner of this device has not allowed the class.
        ModelError: `given` is neither such a path nor such a class or object.
    """
    if isinstance(given, str) and ":" in given:
        try:
            check_import(given)
        except NotAllowed as error:
            raise NotAllowed(f"{where} = {error}") from None
        return given
    if isinstance(given, base) and base is nn.Module:
        return given
    if isinstance(given, type) and issubclass(given, base):
        given = cast(type, given)
        importable = getattr(sys.modules.get(given.__module__), given.__name__, None) is given
        return _path_of(given) if importable else given
    raise ModelError(
        f"{where} = {given!r}: give {otherwise}a class of your own as 'package.module:Class', which must extend "
        f"{base.__module__.removesuffix('.modules.module')}.{base.__name__}."
    )


def described(given: Any) -> str:
    """Return the result of `read` in the form that a recipe uses."""
    if isinstance(given, str):
        return given
    return _path_of(given if isinstance(given, type) else type(given))


def found(where: str, given: Any, base: type) -> Any:
    """Return the user's class. `given` is a result of `read`; if it is a path, import the class from this path.

    Raises:
        NotAllowed: the owner of this device has not allowed the class.
        ModelError: the class cannot be imported, or does not extend `base`.
    """
    if not isinstance(given, str):
        return given
    try:
        return own(given, base)
    except NotAllowed:
        raise
    except RecipeError as error:
        raise ModelError(f"{where} = {error}", key_of(where)) from error


def called(
    where: str, make: Callable[..., nn.Module], args: tuple[Any, ...], options: Mapping[str, Any], form: str
) -> Any:
    """Call the constructor of a user's class.

    Args:
        where: the option, for error texts.
        make: the class.
        args: its arguments.
        options: its arguments by name.
        form: the signature that the constructor should have, such as `def __init__(self, shapes, num_outputs)`. The
            error shows this signature if `make` takes other arguments.

    Raises:
        ModelError: the constructor raises an error; the text lists the arguments of the call.
    """
    try:
        return make(*args, **options)
    except ModelError:
        raise
    except Exception as error:
        given = ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in options.items())])
        cure = f" Write {form}." if refusal(make, args, options) else ""
        text = f"{where}: calling it with ({given}) raised {type(error).__name__}: {error}.{cure}"
        raise ModelError(text, key_of(where)) from error


def refusal(call: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None = None) -> str:
    """Return why a function or a class cannot be called with these arguments; empty if it can."""
    try:
        inspect.signature(call).bind(*args, **(options or {}))
    except TypeError as error:
        return str(error)
    except ValueError:  # a function of C has no signature
        return ""
    return ""


def fusion_class(fusion: Any) -> type[Fusion]:
    """Return the class for the option `fusion`: one of `FUSIONS`, or the user's own class."""
    if isinstance(fusion, str) and fusion in FUSIONS:
        return FUSIONS[fusion]
    return found("[model] fusion", fusion, Fusion)  # type: ignore[no-any-return]


def _path_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
