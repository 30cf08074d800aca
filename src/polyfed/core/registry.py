"""Finds the class that a name in a recipe means: a registered name, or the user's own class `package.module:Class`.

Importing a module runs its code. A user who runs a recipe on their own machine accepts this, as with `python
module.py`. On a device, a server sends the recipe, so the owner of the device did not choose the code that it names.
The owner therefore decides which modules may be imported. Inside `only(allowance)`, polyfed imports nothing and reads
no saved model unless the allowance lists it.
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
    """What a recipe from a server may use: the [allow] section of a device's policy file.

    Attributes:
        imports: classes that may be imported, as `package.module:Class`, or `package.*` for every class in a package.
        models: allowed values of the option `path` of the encoder `hf`, compared as texts.
        label: arrays of the device's data that a recipe may name as `[data] label`, besides the standard name. The
            next three lists do the same for the other keys of [data].
        ids: arrays that a recipe may name as `[data] ids`.
        split: arrays that a recipe may name as `[data] split`.
        class_names: arrays that a recipe may name as `[data] class_names`.
        columns: arrays that `[data] modalities` may join to a modality, or of which `[data] columns` may speak.
        groups: arrays by which an evaluation job may group the test rows (`[algorithm] groups`).
    """

    imports: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    label: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    @classmethod
    def parse(cls, table: Any, where: str) -> "Allowance":
        """Read the section.

        Args:
            table: the section as parsed from TOML.
            where: the file and section, for messages.

        Raises:
            RecipeError: a key is unknown, a value is not a list of strings, or an entry cannot match any recipe.
        """
        if not isinstance(table, Mapping):
            raise RecipeError(f"{where} is a section: write [allow], and its keys in the lines below")
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
"""The allowance in force. It is None outside of a `with only(...)` block. Everything is allowed there,
because the user of this machine chose the recipe."""


@contextmanager
def only(allowance: Allowance) -> Iterator[None]:
    """While the block runs, refuse imports and saved models that the allowance does not list."""
    token = _ALLOWANCE.set(allowance)
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


def restricted() -> bool:
    """Whether the recipe comes from somebody else, because this code runs inside of a `with only(...)` block."""
    return _ALLOWANCE.get() is not None


def check_import(path: str) -> None:
    """Refuse to import a class that the owner of this device has not allowed.

    This check has an effect only inside of a `with only(...)` block.

    Raises:
        NotAllowed: the class is not allowed. The error message gives the line of the policy file that would allow it.
    """
    allowance = _ALLOWANCE.get()
    if allowance is not None and not allowance.has_import(path):
        raise NotAllowed(
            f"'{path}' is code that this device has not been allowed to import. It would be allowed if the device's "
            f'policy file said: [allow] imports = ["{path}"]'
        )


def check_model(path: str) -> None:
    """Refuse a saved model that the owner of this device has not allowed.

    This check has an effect only inside of a `with only(...)` block.

    Raises:
        NotAllowed: the model is not allowed; the text holds the line that would allow it.
    """
    allowance = _ALLOWANCE.get()
    if allowance is not None and path not in allowance.models:
        raise NotAllowed(
            f"'{path}' is a saved model that this device has not been allowed to read. It would be allowed if the "
            f'device\'s policy file said: [allow] models = ["{path}"]'
        )


def check_array(role: str, name: str, key: str = "") -> None:
    """Refuse a role of an array that the owner of this device has not allowed.

    This check has an effect only inside of a `with only(...)` block.

    Args:
        role: the key of [data] that names the array: `label`, `ids`, `split` or `class_names`.
        name: the name of the array.
        key: the key of the recipe, for the error; by default that of [data].

    Raises:
        NotAllowed: the array may not have this role; the text holds the line that would allow it.
    """
    allowance = _ALLOWANCE.get()
    if allowance is not None and name not in getattr(allowance, role):
        raise NotAllowed(
            f"{key or f'[data] {role}'} = '{name}' names an array that this device has not been allowed to use for "
            "this key. Remove the key from the recipe. The array would be allowed if the device's policy file said: "
            f'[allow] {role} = ["{name}"]'
        )


def allowed_arrays(role: str) -> tuple[str, ...]:
    """Return the arrays that the owner of this device allows for a key of [data]. It is empty outside of `only`."""
    allowance = _ALLOWANCE.get()
    return () if allowance is None else getattr(allowance, role)


def find(name: str, registered: Mapping[str, type], base: type) -> Any:
    """Look up the class that a name in a recipe means.

    Args:
        name: a registered name, or the path `package.module:Class` of the user's own class.
        registered: classes by name.
        base: the class that the user's own class must extend. The user's class must also be a dataclass.

    Returns:
        The class.

    Raises:
        NotAllowed: the owner of this device has not allowed the path.
        RecipeError: the name is unknown, the path cannot be imported, or it leads to another kind of object.
    """
    if ":" not in name:
        if name not in registered:
            hint = did_you_mean(name, registered)
            raise RecipeError(f"'{name}' is unknown; {hint}; or your own, 'package.module:Class'")
        return registered[name]
    result = own(name, base)
    if not is_dataclass(result):
        raise RecipeError(
            f"'{name}' must be a dataclass, since its fields are the keys of the section. Write "
            f"@dataclass(frozen=True, kw_only=True) above class {result.__name__}"
        )
    _refuse_undeclared(name, result)
    return result


def own(path: str, base: type) -> Any:
    """Import the class at `package.module:Class`, which must extend `base`. The class is not called.

    Raises:
        NotAllowed: the owner of this device has not allowed the class; nothing was imported.
        RecipeError: the class cannot be imported, or does not extend `base`.
    """
    module, name = _parsed(path)
    check_import(path)
    try:
        result = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # the module's own code runs and may raise anything
        why = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise RecipeError(
            f"'{path}' cannot be imported ({why}). {_READS}, and the folder of the package must be on PYTHONPATH "
            "(PYTHONPATH=. for a module in this folder)"
        ) from error
    if not (issubclass(type(result), type) and issubclass(result, base)):
        raise RecipeError(f"'{path}' must be a class that extends {_public(base)}; it is {_described(result)}")
    return result


def name_of(part: Any, registered: Mapping[str, type]) -> str:
    """Return the name by which a recipe selects the class of `part`: a registered name, or `package.module:Class`."""
    for name, cls in registered.items():
        if type(part) is cls:
            return name
    return f"{type(part).__module__}:{type(part).__qualname__}"


def _parsed(path: str) -> tuple[str, str]:
    """Split a path `package.module:Class` into module and class, before anything is imported.

    Raises:
        RecipeError: the path does not have this form, or its module belongs to Python's standard library or is a
            command (`__main__`).
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
    """Return the shortest path from which a class can be imported. The documentation uses this path."""
    names = cls.__module__.split(".")
    modules = [".".join(names[: depth + 1]) for depth in range(len(names))]
    home = next((name for name in modules if vars(sys.modules[name]).get(cls.__name__) is cls), cls.__module__)
    return f"{home}.{cls.__name__}"


def _described(found: Any) -> str:
    """Describe the object that a path leads to, without calling any of its methods."""
    if issubclass(type(found), type):
        return f"the class {found.__module__}.{found.__qualname__}"
    return f"of type {type(found).__name__}"


def _refuse_undeclared(path: str, found: Any) -> None:
    """Refuse a class that annotates options but is not a dataclass, because such a class would silently ignore them."""
    if "__dataclass_fields__" in vars(found):
        return
    inherited = {f.name for f in fields(found)}
    if options := [name for name in vars(found).get("__annotations__", {}) if name not in inherited]:
        raise RecipeError(
            f"'{path}' has the options {', '.join(options)}, but no decorator makes them such. Write "
            f"@dataclass(frozen=True, kw_only=True) above class {found.__name__}"
        )
