"""What a server sends besides a request is two texts. Whatever they are, a device runs none of it.

`test_recipe_code.py` has the code that a recipe can name, `test_overload.py` the sizes, and `test_own_transport.py` the
server that answers as it likes.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[device] is not installed")

from engines.devices import Devices
from polyfed.core.errors import RecipeError
from polyfed.deploy.device.tasks import answer, packed
from polyfed.engines.protocol import hello
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.federation.wire.wire_format import Packet, unframed
from refusals import refuses

THIEF = "import pathlib\npathlib.Path({told!r}).touch()\n"


def answered(folder: Path, app: bytes, config: dict[str, Any]) -> Packet:
    """What a device answers to a request to enrol that comes with this app."""
    place = folder / "task"
    place.mkdir(exist_ok=True)
    (place / "header").write_text(json.dumps(hello().header))
    (folder / "sent").write_bytes(app)
    answer({"folder": str(place), "app": str(folder / "sent"), "config": config, "refusal": ""})
    told = unframed((place / "reply").read_bytes())
    assert isinstance(told, Packet)
    return told


WHOLE = b"a whole recipe"
APPS = {
    "nothing": b"",
    "a part of a length": b"\x01",
    "a length beyond the end": b"\xff\xff\xff\xff" + WHOLE,
    "no text": b"\x04\x00\x00\x00\xff\xfe\xfd\xfc",
    "no recipe": packed("this = is = none", ""),
    "another recipe": packed("seed = 'x'", ""),
}


@pytest.mark.parametrize("what", APPS)
def test_an_app_that_is_none_is_answered_with_a_reason(what: str, tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    told = answered(tmp_path, APPS[what], devices.configs[1])
    assert told.header["verdict"] == "failed"
    assert told.header["reason"].startswith(("client 1: ", "the message has no recipe"))
    assert told.body == b""


def test_code_in_an_app_is_a_text_that_nobody_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """Neither as a recipe, nor as the values of a warm start, nor beside a recipe that is whole."""
    devices, told = Devices(tmp_path), tmp_path / "stolen"
    monkeypatch.chdir(tmp_path)
    code, recipe = THIEF.format(told=str(told)), devices.recipe.read_text()
    for texts in ((code, ""), (recipe, code), (recipe + f"\n# {code!r}", code)):
        answered(tmp_path, packed(*texts), devices.configs[1])
    written = sorted(path.name for path in (tmp_path / "task").iterdir())
    assert written == ["header", "init.json", "recipe.toml", "reply"], "under names that the server does not choose"
    assert not told.exists()


@pytest.mark.parametrize("part", ["a.", "a . ", '"\\"".', "'\"'.", "é."])
def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(part: str, tmp_path: Path) -> None:
    """Python's parser needs memory in proportion to the square of the number of parts: gigabytes for these 100 kB."""
    (tmp_path / "recipe.toml").write_text(part * (100_000 // len(part)) + "a = 1\n", encoding="utf-8")
    started = time.monotonic()
    with refuses(RecipeError, "levels deep"):
        load_recipe(tmp_path / "recipe.toml")
    assert time.monotonic() - started < 5
