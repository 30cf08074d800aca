"""A script that imports a module by its earlier name learns where the module is now."""

import importlib
import sys
from importlib.machinery import PathFinder

import pytest

import polyfed
from polyfed.core import moved


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_an_earlier_module_names_its_present_place(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^polyfed\.{old} is now polyfed\.{moved.MODULES[old]}"):
        importlib.import_module(f"polyfed.{old}")


@pytest.mark.parametrize("place", sorted(set(moved.MODULES.values())))
def test_every_present_place_exists(place: str) -> None:
    assert importlib.import_module(f"polyfed.{place}")


@pytest.mark.parametrize("place", sorted({new for names in moved.NAMES.values() for new in names.values()}))
def test_every_present_name_exists(place: str) -> None:
    module, _, name = place.rpartition(".")
    assert hasattr(importlib.import_module(f"polyfed.{module}"), name)
    assert moved.NAMES.keys() <= moved.MODULES.keys()


@pytest.mark.parametrize("line", ["from polyfed.algorithm import Averaging", "from polyfed import algorithm"])
def test_both_ways_to_import_are_explained(line: str) -> None:
    with pytest.raises(ImportError, match=r"polyfed\.algorithm is now .*Averaging in polyfed\.algorithms\.averaging"):
        exec(line, {})


def test_a_submodule_of_an_earlier_package_is_explained_by_its_package() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"polyfed\.view is now polyfed\.training"):
        importlib.import_module("polyfed.view.base")


def test_other_modules_that_do_not_exist_keep_python_s_own_error() -> None:
    for name in ("polyfed.nothing", "algorithm_that_nobody_wrote", "polyfedd.algorithm"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)


@pytest.mark.parametrize("old", sorted(moved.MODULES))
def test_no_module_that_exists_is_hidden(old: str) -> None:
    assert sys.meta_path.index(moved._FINDER) > sys.meta_path.index(PathFinder), "it must be asked last"
    parent, _, _ = f"polyfed.{old}".rpartition(".")
    assert PathFinder.find_spec(f"polyfed.{old}", importlib.import_module(parent).__path__) is None


def test_it_is_installed_once() -> None:
    moved.install()
    importlib.reload(polyfed)
    assert sys.meta_path.count(moved._FINDER) == 1
