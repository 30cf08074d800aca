"""Finds the parts of a run by name: those of polyfed, and the user's own as `package.module:Class`.

Importing a module runs its code. Users who run their own recipes accept that, as they do with `python module.py`. On a
device, the recipe comes from a server, and the device's owner decides: inside `only(allowance)`, no module is imported
and no model is read that the allowance does not list.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from polyfed.core.errors import NotAllowed, RecipeError, did_you_mean

_DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PATH = re.compile(rf"({_DOTTED}):([^\W\d]\w*)")
_ENTRY = re.compile(rf"{_DOTTED}(?::[^\W\d]\w*|\.\*)")

_READS = "It must read 'package.module:Class'"


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a recipe from a server may use on this device: the [allow] section of the device's policy file.

    Attributes:
        imports: classes that may be imported, as `package.module:Class`, or `package.*` for everything in a package.
        models: saved models that the encoder `hf` may read, spelt exactly like its `path`.
    """

    imports: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    @classmethod
    def parse(cls, table: Any, where: str) -> "Allowance":
        """Read the section.

        Args:
            table: the section as read from TOML.
            where: its place, for error texts.

        Raises:
            RecipeError: it is no table, has an unknown key or a value that is no list of strings, or an entry of
                `imports` is not of the form `package.module:Class` or `package.*`.
        """
        if not isinstance(table, Mapping):
            raise RecipeError(f"{where} is a section: write [allow] and its keys below it")
        allowed = [f.name for f in fields(cls)]
        for key, words in table.items():
            if key not in allowed:
                raise RecipeError(f"{where} has no key '{key}'; {did_you_mean(key, allowed)}")
            if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
                raise RecipeError(f'{where} {key} = {words!r}: must be a list of words, as in ["..."]')
        for entry in table.get("imports", ()):
            if not _ENTRY.fullmatch(entry):
                raise RecipeError(f"{where} imports: '{entry}' must read 'package.module:Class' or 'package.*'")
        return cls(**{key: tuple(words) for key, words in table.items()})

    def has_import(self, path: str) -> bool:
        """Whether `package.module:Class` may be imported."""
        module = path.partition(":")[0]
        packages = [entry.removesuffix(".*") for entry in self.imports if entry.endswith(".*")]
        return path in self.imports or any(f"{module}.".startswith(f"{package}.") for package in packages)


_ALLOWANCE: ContextVar[Allowance | None] = ContextVar("allowance", default=None)
"""The allowance in force; None where users run their own recipes, which may use anything."""


@contextmanager
def only(allowance: Allowance) -> Iterator[None]:
    """Inside the `with` block, recipes may import only classes and read only models that the allowance lists."""
    token = _ALLOWANCE.set(allowance)
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


def check_import(path: str) -> None:
    """Check that a class may be imported; outside of `only`, every class may.

    Raises:
        NotAllowed: the allowance does not list the class. The text gives the line that would allow it.
    """
    allowance = _ALLOWANCE.get()
    if allowance is not None and not allowance.has_import(path):
        raise NotAllowed(
            f"'{path}' is code that this device has not been allowed to import. It would be allowed if the device's "
            f'policy file said: [allow] imports = ["{path}"]'
        )


def check_model(path: str) -> None:
    """Check that a saved model may be read; outside of `only`, every model may.

    Raises:
        NotAllowed: the allowance does not list the model. The text gives the line that would allow it.
    """
    allowance = _ALLOWANCE.get()
    if allowance is not None and path not in allowance.models:
        raise NotAllowed(
            f"'{path}' is a saved model that this device has not been allowed to read. It would be allowed if the "
            f'device\'s policy file said: [allow] models = ["{path}"]'
        )


def find(name: str, registered: Mapping[str, type], base: type) -> Any:
    """Find a class by its registered name or by its path.

    Args:
        name: a registered name, or the path `package.module:Class` of a class of the user's own.
        registered: polyfed's classes by name.
        base: the class that the user's class must extend; it must also be a dataclass.

    Raises:
        NotAllowed: the owner of this device has not allowed the class; nothing was imported.
        RecipeError: the name is unknown, the class cannot be imported, or it is not such a dataclass.
    """
    if ":" not in name:
        if name not in registered:
            hint = did_you_mean(name, registered)
            raise RecipeError(f"'{name}' is unknown; {hint}; or your own, 'package.module:Class'")
        return registered[name]
    found = own(name, base)
    if not is_dataclass(found):
        raise RecipeError(
            f"'{name}' must be a dataclass, since its fields are the keys of the section. Write "
            f"@dataclass(frozen=True, kw_only=True) above class {found.__name__}"
        )
    _refuse_undeclared(name, found)
    return found


def own(path: str, base: type) -> Any:
    """Import a class of the user's own, without creating an object of it.

    Args:
        path: `package.module:Class`.
        base: the class that it must extend.

    Raises:
        NotAllowed: the owner of this device has not allowed the class; nothing was imported.
        RecipeError: it cannot be imported, or does not extend `base`.
    """
    module, name = _parsed(path)
    check_import(path)
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # the module's own code runs and may raise anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise RecipeError(
            f"'{path}' cannot be imported ({why}). {_READS}, and the folder of the package must be on PYTHONPATH "
            "(PYTHONPATH=. for a module in this folder)"
        ) from error
    # `type`, not `isinstance`: an object can pretend to be a class by its __class__
    if not (issubclass(type(found), type) and issubclass(found, base)):
        raise RecipeError(f"'{path}' must be a class that extends {_public(base)}; it is {_described(found)}")
    return found


def name_of(part: Any, registered: Mapping[str, type]) -> str:
    """The registered name of the class of an object, or the path of a class of the user's own."""
    for name, cls in registered.items():
        if type(part) is cls:
            return name
    return f"{type(part).__module__}:{type(part).__qualname__}"


def _parsed(path: str) -> tuple[str, str]:
    """Split a path into its module and class; nothing is imported.

    Raises:
        RecipeError: the path is not of this form, or names a standard module or a command.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        raise RecipeError(f"'{path}' cannot be imported. {_READS}")
    module, name = match.groups()
    top, *inner = module.split(".")
    if top in sys.stdlib_module_names:
        raise RecipeError(
            f"'{path}' is not imported: '{top}' is a module of Python's standard library, which holds no part of a "
            "run. A module of your own needs another name"
        )
    if "__main__" in inner:
        raise RecipeError(f"'{path}' is not imported: '{module}' is a command, which would be run. Name a module")
    return module, name


def _public(cls: type) -> str:
    """The shortest path from which a class can be imported, as documentation names it."""
    names = cls.__module__.split(".")
    modules = [".".join(names[: depth + 1]) for depth in range(len(names))]
    home = next((name for name in modules if vars(sys.modules[name]).get(cls.__name__) is cls), cls.__module__)
    return f"{home}.{cls.__name__}"


def _described(found: Any) -> str:
    """Describe what a path leads to, without calling any of its methods."""
    if issubclass(type(found), type):
        return f"the class {found.__module__}.{found.__qualname__}"
    return f"of type {type(found).__name__}"


def _refuse_undeclared(path: str, found: Any) -> None:
    """Refuse a class that lists options but lacks @dataclass: it would silently run with the options of its parent.

    Raises:
        RecipeError: with the names of the options.
    """
    if "__dataclass_fields__" in vars(found):
        return
    inherited = {f.name for f in fields(found)}
    if options := [name for name in vars(found).get("__annotations__", {}) if name not in inherited]:
        raise RecipeError(
            f"'{path}' has the options {', '.join(options)}, but no decorator makes them such. Write "
            f"@dataclass(frozen=True, kw_only=True) above class {found.__name__}"
        )
