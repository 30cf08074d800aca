"""Models of 300 MB and 1 GB through the server and its devices. Slow; needs 8 GB of memory, and 16 GB for 1 GB."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.federations import Federation, rows
from polyfed.report import reconcile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RECIPE = """
seed = 1
rounds = 1
[data]
name = "cg-digits"
[clients]
num = 3
[model]
embedding = 16
[model.encoders]
gray = { kind = "mlp", hidden = [6500, 6500] }
color = { kind = "mlp", hidden = [6500, 6500] }
[train]
steps = 1
batch_size = 32
lr = 0.01
[algorithm]
name = "fedavg"
[evaluate]
every = 0
[deployment]
reply_seconds = 1200
"""

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "transport.py"
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.skipif(MEMORY < 12 * 2**30, reason="needs 12 GiB of memory")
def test_three_clients_send_and_receive_more_than_300_megabytes_each(tmp_path: Path) -> None:
    recipe = tmp_path / "large.toml"
    recipe.write_text(RECIPE)
    with Federation(recipe, tmp_path / "fed") as federation:
        federation.start()
        federation.run().wait(1500)
        assert not (federation.out / "error.json").exists(), (federation.out / "error.json").read_text()
        states = [place / "polyfed-state" for place in federation.nodes]
        found = reconcile(federation.out, states)
    assert json.loads((federation.out / "result.json").read_text())["rounds"] == 1
    for client in range(3):
        for way in ("client", "server"):
            booked = [row for row in rows(federation.out / "egress.jsonl") if row["client"] == client]
            assert sum(row["bytes"] for row in booked if row["destination"] == way) > 300e6
    assert found.findings == ()


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("transport_of_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def small(benchmark: Any, tmp_path_factory: Any) -> dict[str, float]:
    """The memory of each process in MB, with a model of 0.04 MB."""
    _, _, most = benchmark.trained(large("0.04 MB", benchmark), tmp_path_factory.mktemp("small") / "fed")
    assert {"run", "server", "device", "a task of a device"} <= set(most)
    return dict(most)


def large(size: str, benchmark: Any, optimiser: str = "none") -> str:
    """A recipe of two rounds, so that the second begins with a model and momentum that the first has left."""
    text = benchmark.LARGE_RECIPE.format(hidden=benchmark.HIDDEN[size]).replace("rounds = 3", "rounds = 2")
    return f'{text}[server]\noptimiser = "{optimiser}"\n'


@pytest.mark.skipif(MEMORY < 16 * 2**30, reason="needs 16 GiB of memory")
@pytest.mark.parametrize(("size", "optimiser", "least"), [("1.03 GB", "none", 1000), ("346 MB", "avgm", 340)])
def test_either_side_holds_at_most_two_models(
    size: str, optimiser: str, least: int, benchmark: Any, small: dict[str, float], tmp_path: Path
) -> None:
    """Memory that belongs to no file, beyond that with a tiny model; docs/results/deployments.md says what it holds."""
    megabytes, seconds, most = benchmark.trained(large(size, benchmark, optimiser), tmp_path / "fed")
    beyond = {who: (most[who] - small[who]) / megabytes for who in small}
    print(f"{megabytes:.0f} MB, {optimiser}: {seconds} s, MB: {most}, models more than with a tiny one: {beyond}")
    assert megabytes > least
    for who, models in beyond.items():
        assert models < (2.1 if who in ("run", "a task of a device") else 0.1), beyond
