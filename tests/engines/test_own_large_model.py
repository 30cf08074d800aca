"""A model of more than 300 MB a client through the server and its devices. Slow; needs 8 GB of memory."""

import json
import os
from pathlib import Path

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
