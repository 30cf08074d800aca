"""A federation of silos whose edges are processes of their own gives what it gives in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.edge_devices import edge_devices
from engines.test_own_modes import SILOS

EDGES = SILOS.replace("server-sees", "edge")


def told(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {name: result.get(name) for name in ("state_sha256", "metrics", "rounds")}


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_with_edges_gives_what_it_gives_in_one_process(tmp_path: Path) -> None:
    with edge_devices(tmp_path, EDGES) as federation:
        federation.run()
        out = federation.app / "run"
    polyfed.run(federation.recipe, tmp_path / "one", engine="sequential")
    import pprint
    pprint.pprint(told(out)); pprint.pprint(told(tmp_path/"one"))
    assert told(out) == told(tmp_path / "one")
