"""Parts of a run by name: those that polyfed brings, and the user's own as `package.module:Class`."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from polyfed.core.errors import RecipeError, did_you_mean


def find(name: str, registered: Mapping[str, type]) -> Any:
    """The class of a registered name, or the user's own class of a path.

    Raises:
        RecipeError: with the nearest name, or what hindered the import.
    """
    if ":" in name:
        return own(name)
    if name not in registered:
        raise RecipeError(f"'{name}' is unknown; {did_you_mean(name, registered)}; or your own, 'package.module:Class'")
    return registered[name]


def own(path: str) -> Any:
    """What `package.module:Class` leads to.

    Raises:
        RecipeError: it cannot be imported.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # the module's own code runs, and may do anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise RecipeError(
            f"'{path}' cannot be imported ({why}). It must read 'package.module:Class', and the folder of the "
            "package must be on PYTHONPATH (PYTHONPATH=. for a module in this folder)"
        ) from error
    _refuse_undeclared(path, found)
    return found


def name_of(part: Any, registered: Mapping[str, type]) -> str:
    """The name under which a part's class is registered, or the path of the user's own."""
    for name, cls in registered.items():
        if type(part) is cls:
            return name
    return f"{type(part).__module__}:{type(part).__qualname__}"


def _refuse_undeclared(path: str, found: Any) -> None:
    """Options that a class writes down are none without the decorator; it would run with those of its parent."""
    if not isinstance(found, type) or not is_dataclass(found) or "__dataclass_fields__" in vars(found):
        return
    inherited = {f.name for f in fields(found)}
    if options := [name for name in vars(found).get("__annotations__", {}) if name not in inherited]:
        raise RecipeError(
            f"'{path}' has the options {', '.join(options)}, but no decorator makes them such. Write "
            f"@dataclass(frozen=True, kw_only=True) above class {found.__name__}"
        )
