"""A deployment that schedules by the rates that its server measures."""

import json
import random
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from attacks.test_own_transport import Federation, reply_in
from engines.own_devices import own_devices
from engines.rough_link import Proxy, Star
from engines.test_own_processes import PATIENCE, OwnFederation
from polyfed.algorithms.pfmml.scheduling import benefit_per_second, scheduled
from polyfed.core.errors import RecipeError
from polyfed.core.tree import SHARED
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.transport import connection
from polyfed.transport.connection import Connection
from polyfed.transport.logins import PrivateKey
from refusals import refuses

RECIPE = """
seed = 3
rounds = {rounds}
[data]
name = "toy"
rows = 240
classes = 4
[clients]
partition = "dirichlet"
num = 4
alpha = 2.0
holdings = [["a", "b"]]
personal_test = 0.2
[model]
embedding = 6
[model.encoders]
a = {{ kind = "mlp", hidden = {hidden} }}
b = {{ kind = "mlp", hidden = {hidden} }}
[train]
batch_size = 16
lr = 0.1
[algorithm]
name = "pfmml"
uploads = {uploads}
max_age = {max_age}
[network]
channel = "measured"
rate_up_bps = 8e6
rate_down_bps = 8e6
[engine]
name = "devices"
[deployment]
enrol_seconds = 120.0
reply_seconds = 120.0
away_seconds = 120.0
"""


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]


def wide(rounds: int, uploads: int = 2, max_age: int = 3, hidden: str = "[64, 64]") -> str:
    return RECIPE.format(rounds=rounds, uploads=uploads, max_age=max_age, hidden=hidden)


def decisions(out: Path) -> list[list[list[bool]]]:
    """Which devices sent which block, in each round, as the outputs of the run say."""
    return [[[bool(sent) for sent in block] for block in row["tables"]["uploads"]] for row in rows_of(out)]


def replayed(out: Path, prior: float, bits: Mapping[str, int]) -> list[list[list[bool]]]:
    """The same, decided anew from what the outputs of the run say was known: rates, coefficients and ages."""
    rows, clients = rows_of(out), 4
    names = list(bits)
    ages = {name: torch.zeros(clients) for name in names}
    due = {name: torch.zeros(clients, dtype=torch.bool) for name in names}
    own = {name: torch.full((clients,), 1 / clients, dtype=torch.float64) for name in names}
    found = []
    for row in rows:

        def known(name: str, otherwise: float, row: dict[str, Any] = row) -> torch.Tensor:
            of = row["links"].get(name, {})
            return torch.tensor([of.get(str(c), otherwise) for c in range(clients)], dtype=torch.float64)

        up, down, work = known("up", prior), known("down", prior), known("work.practise", 0.0)
        fetched = torch.stack([bits[name] * due[name].double() for name in names]).sum(0)
        queued, chosen = torch.zeros(clients).double(), []
        for name in names:
            seconds = fetched / down + work + (queued + bits[name]) / up
            scores = benefit_per_second(1 - own[name], seconds, None)
            sends = scheduled(scores, torch.ones(clients, dtype=torch.bool), ages[name], 2, 3)
            queued += bits[name] * sends
            chosen.append(sends)
        found.append([one.tolist() for one in chosen])
        for name, sends in zip(names, chosen, strict=True):
            ages[name] = torch.where(sends, 0, ages[name] + 1)
            due[name] = sends
            own[name] = torch.tensor(row["tables"][f"coefficients.{name}"], dtype=torch.float64).diagonal()
    return found


def sizes(out: Path) -> dict[str, int]:
    """Bits of each block, in the order in which they are scheduled."""
    blocks = json.loads((out / "run.json").read_text())["blocks"]
    return {name: 8 * size for name, size in blocks.items()}


def test_the_outputs_of_a_deployment_say_by_which_rates_each_round_decided(tmp_path: Path) -> None:
    with own_devices(tmp_path, wide(5)) as made:
        made.run()
        out = made.app / "run"
        assert not made.server.hub.queue._rows.execute("SELECT count(*) FROM carried").fetchone()[0]
        assert not made.server.hub.meter._open, "nothing is kept of requests that have ended"
    rows = rows_of(out)
    assert rows[0]["links"] == {}, "before the first round, nothing is measured"
    assert set(rows[1]["links"]) >= {"up", "work.practise"}
    assert set(rows[-1]["links"]["work.practise"]) == set("0123"), "every device has trained"
    assert decisions(out) == replayed(out, 8e6, sizes(out))
    assert list(sizes(out)) == ["a", "b", SHARED]
    assert "simulated_seconds" not in json.loads((out / "result.json").read_text())
    assert polyfed.load_run(out).result["rounds"] == 5


def test_a_run_that_is_killed_decides_the_same_when_it_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """The transfers of the repeated round take another time; the checkpoint has what was known at its begin."""
    from polyfed.experiment.running.loop import _Loop

    with own_devices(tmp_path, wide(4)) as made:
        whole, lost = _Loop.save, dict[str, Any]()

        def dies(loop: Any, row: Any, state: Any) -> None:
            if row["round"] == 3 and not lost:
                lost.update(row)
                raise KeyboardInterrupt
            whole(loop, row, state)

        monkeypatch.setattr(_Loop, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            made.run()
        made.run()
    rows = rows_of(made.app / "run")
    assert rows[2]["links"] == lost["links"]
    assert rows[2]["tables"]["uploads"] == lost["tables"]["uploads"]
    assert decisions(made.app / "run") == replayed(made.app / "run", 8e6, sizes(made.app / "run"))


def test_a_simulation_and_a_method_that_reads_no_rates_refuse_and_check_says_what_counts(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(wide(1))
    text = repr(polyfed.check(path))
    for words in ("Measured links", "8e+06", "rounds.jsonl"):
        assert words in text
    with refuses(RecipeError, "network.channel: simulation"):
        load_recipe(path, ["engine.name=sequential"])
    with refuses(RecipeError, "network.channel: rates"):
        load_recipe(path, ["algorithm={name='fedavg'}"])


# what is measured, at the web server


LARGE = random.Random(1).randbytes(2**20)


@pytest.mark.parametrize("rate", [2e6, 5e5])
def test_the_server_measures_about_the_rate_of_the_line_in_both_directions(rate: float, tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    proxy = Proxy(federation.port)
    key = PrivateKey(federation.folder / "node-0.key")
    ca = federation.folder / "ca.pem"
    device = Connection(f"127.0.0.1:{proxy.port}", ca, key, federation.stop, lambda text: None)
    federation.devices.append(device)
    name = federation.asked(body=LARGE, most=2 * len(LARGE))
    told = device.next()
    assert told is not None
    proxy.rate = rate
    assert device.fetch(name, "body", told["body"]["sha256"], len(LARGE), tmp_path / "body")
    time.sleep(0.5)
    assert device.send(name, reply_in(tmp_path, LARGE)) == connection.TAKEN
    (carried,) = federation.queue.carried([name]).values()
    proxy.close()
    federation.close()
    assert carried.up_bytes == len(LARGE)
    assert carried.down_bytes == len(LARGE)
    assert 0.5 < carried.up_bytes / carried.up_s / rate < 2.0
    assert 0.4 <= carried.work_s < 5.0


def lying(call: Any, method: str, path: str, body: Any = None, headers: Any = None) -> None:
    """A call whose headers claim another time and a rate."""
    call(
        method, path, body=body, headers={**(headers or {}), "date": "Thu, 01 Jan 2099 00:00:00 GMT", "x-rate": "1e12"}
    )


def test_a_device_that_stalls_or_claims_other_times_changes_only_its_own_rate(tmp_path: Path) -> None:
    """It sends slowly, after a long pause, and with a date of its own; the other one is measured as before."""
    federation, large = Federation(tmp_path), LARGE[: 2**18]
    ca, rates = federation.folder / "ca.pem", []
    for number, stalls in ((0, True), (1, False)):
        proxy = Proxy(federation.port)
        key = PrivateKey(federation.folder / f"node-{number}.key")
        device = Connection(f"127.0.0.1:{proxy.port}", ca, key, federation.stop, lambda text: None)
        federation.devices.append(device)
        name = federation.asked(number, body=large, most=2 * len(large))
        assert device.next() is not None
        proxy.rate = 1e5 if stalls else 1e6
        way: Any = device._connected(20.0)
        way.request = partial(lying, way.request)
        assert device.send(name, reply_in(tmp_path, large)) == connection.TAKEN
        (carried,) = federation.queue.carried([name]).values()
        rates.append(carried.up_bytes / carried.up_s)
        proxy.close()
    federation.close()
    assert rates[0] < 2e5
    assert 5e5 < rates[1] < 2e6


# packets


class Spaces(OwnFederation):
    """A server and devices in network namespaces."""

    address = Star.address
    star: Star

    def inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self.star.space(name if name.startswith("device-") else "server")]


def apart(folder: Path, star: Star, recipe: str) -> Spaces:
    try:
        star.up()
    except (OSError, subprocess.CalledProcessError) as error:
        star.close()
        pytest.skip(f"no network namespaces can be made here: {getattr(error, 'stderr', error)}")
    Spaces.star = star
    try:
        return Spaces(folder, 0, recipe=recipe)
    except BaseException:
        star.close()
        raise


BPS = [125e3, 500e3, 2e6]
"""The slowest device is the first one, which round 1 takes, because nothing is known then."""

ROUNDS, QUIET = 9, 6
ONE = (
    wide(ROUNDS, 1, 0, "[256, 256]")
    .replace("num = 4", "num = 3")
    .replace('[["a", "b"]]', '[["a"]]')
    .replace('b = { kind = "mlp", hidden = [256, 256] }\n', "")
    .replace("batch_size", "steps = 2\nbatch_size")
    .replace("reply_seconds = 120.0", "reply_seconds = 600.0")  # with 30 % loss, a copy takes minutes
    .replace('name = "toy"', 'name = "toy"\nshapes = { a = [16] }')
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_schedule_follows_the_rates_of_the_lines_and_goes_on_under_loss_and_kills(tmp_path: Path) -> None:
    """Three lines of 125, 500 and 2,000 kbit/s; then 30 % loss, and the fastest device, server and run are killed."""
    star = Star([f"{rate / 1e3:.0f}kbit" for rate in BPS])
    federation = apart(tmp_path, star, ONE)
    try:
        federation.began()
        run = federation.start("run")
        federation.until(lambda: f"round {QUIET}:" in federation.log("run"), f"round {QUIET}")
        star.loss = 0.3
        for victim in ("device-2", "server", "run"):
            time.sleep(1.0)
            federation.kill(victim)
            process = federation.start(victim)
            run = process if victim == "run" else run
        assert run.wait(4 * PATIENCE) == 0, federation.log("run")
    finally:
        federation.stop()
        star.close()
    out = federation.app / "run"
    rows, sent = rows_of(out), decisions(out)
    assert len(rows) == ROUNDS
    known, chosen = rows[QUIET - 1]["links"]["up"], [row[0].index(True) for row in sent]
    print(known, chosen, star.lost)
    assert chosen[0] == 0
    assert set(chosen[1:QUIET]) == {1, 2}, "the slowest line is not chosen again"
    assert chosen[1:QUIET].count(2) >= chosen[1:QUIET].count(1)
    assert known["1"] == pytest.approx(BPS[1], rel=0.25)
    assert known["2"] == pytest.approx(BPS[2], rel=0.25)
    assert known["0"] == pytest.approx((8e6 * BPS[0]) ** 0.5, rel=0.25), "one measurement, and that of [network]"
    assert star.lost > 0
