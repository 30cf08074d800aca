"""Every kind of run over polyfed's own transport gives what it gives in one process: model, ledgers, scores."""

import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.own_devices import own_devices
from engines.test_own_processes import PATIENCE, OwnFederation
from polyfed.core.errors import TooFewReplies, TransportError
from polyfed.core.system.files import PUBLIC_KEY
from polyfed.deploy.app_folder import write_job
from polyfed.deploy.device.memory.store import STORE
from polyfed.deploy.server.server import ANSWERS
from polyfed.engines.protocol import RUN_NAME
from polyfed.engines.queued import QueueTransport
from polyfed.experiment.certificate import certify, verify_certificate
from polyfed.experiment.evaluate import job_of
from polyfed.report import reconcile
from refusals import refuses

BASE = """
seed = 3
rounds = 2
[data]
name = "toy"
rows = 120
classes = 3
[clients]
partition = "dirichlet"
num = 3
alpha = 5.0
personal_test = 0.3
[model]
embedding = 6
[model.encoders]
a = { kind = "mlp", hidden = [8] }
b = { kind = "mlp", hidden = [8] }
[train]
batch_size = 16
lr = 0.1
[algorithm]
name = "METHOD"
[deployment]
enrol_seconds = 120.0
reply_seconds = 120.0
away_seconds = 120.0
"""
PER_SILO = """
[egress.a]
silo = ["parameters", "embeddings"]
[egress.b]
silo = ["parameters", "embeddings"]
[egress.shared]
server = ["parameters", "statistic"]
silo = ["parameters", "statistic", "ids"]
"""
SPLIT = """
[egress.a]
server = ["parameters", "embeddings"]
[egress.b]
server = ["parameters", "embeddings"]
[egress.shared]
server = ["parameters", "statistic"]
[egress.labels]
server = ["labels"]
"""


def method(name: str, more: str = "", **changes: str) -> str:
    text = BASE.replace("METHOD", name) + more
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


SILOS = (
    method("hfm", PER_SILO)
    .replace('partition = "dirichlet"\nnum = 3\nalpha = 5.0\npersonal_test = 0.3', 'partition = "silos"\nsilos = 2')
    .replace("batch_size = 16\n", "")
    .replace("[deployment]", '[deployment]\nrelay = "server-sees"')
)
MODES = {
    "a buffer of all": method("fedbuff").replace('"fedbuff"', '"fedbuff"\nbuffer = 1.0'),
    "personal heads": method("fedrep"),
    "split learning": method("split-learning", SPLIT),
    "secure aggregation": method("fedavg", "[secure_aggregation]\n").replace("rounds = 2", "rounds = 1"),
    "compressed": method("fedavg", '[wire]\ncompress = { a = "int8", shared = "top-k" }\ndown = "bf16"\n'),
    "HFM with relay": SILOS.replace("rounds = 2", "rounds = 1"),
}


def silo_of(client: int) -> str:
    return f'silo = {client // 2}\nrelay = "server-sees"' if client >= 0 else ""


def more_of(text: str) -> Callable[[int], str]:
    return silo_of if "silos" in text else lambda client: ""


def told(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return {name: result.get(name) for name in ("state_sha256", "metrics", "rounds", "bytes_up", "bytes_down")}


def ledger(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "egress.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "run"} for row in rows]


def equal(recipe: Path, out: Path, spare: Path) -> None:
    """The run in `out` is what the recipe gives in one process."""
    polyfed.run(recipe, spare, engine="sequential")
    assert told(out) == told(spare)
    assert ledger(out) == ledger(spare)


def certified(credentials: Path, out: Path, states: list[Path]) -> None:
    """Every device has signed the ledger that the server certifies, and its login key that of its log."""
    keys = out.parent / "keys"
    keys.mkdir()
    for path in (*credentials.glob("*.pub"), out / PUBLIC_KEY):
        shutil.copy(path, keys)
    path, content = certify(out, keys=keys)
    found = verify_certificate(path, keys, out, states)
    assert found.faults == []
    assert [one["name"] for one in content["clients"]] == [f"node-{number}" for number in range(len(states))]
    assert all(one["receipt"]["tie"] for one in content["clients"])


@pytest.mark.parametrize("mode", MODES)
def test_a_run_gives_what_it_gives_in_one_process(mode: str, tmp_path: Path) -> None:
    text = MODES[mode]
    with own_devices(tmp_path, text, more=more_of(text)) as federation:
        federation.run()
        assert not list((federation.credentials / "queue").glob("*.reply")), "nothing is left in the queue"
        states = [federation.state(client) for client in range(len(federation.places))]
        certified(federation.credentials, federation.app / "run", states)
    equal(federation.recipe, federation.app / "run", tmp_path / "one")


def test_a_run_ends_at_once_when_all_its_devices_have_answered_and_cannot_enrol(tmp_path: Path) -> None:
    began = time.monotonic()
    policy = "[nonsense]\n"
    with own_devices(tmp_path, method("fedavg"), policy=policy) as made, refuses(TooFewReplies, "policy file"):
        made.run()
    assert time.monotonic() - began < 100, "enrol_seconds are 120"


def interrupt(monkeypatch: Any, answers: int = 5) -> None:
    """End the first run after so many answers: three enrolments, and two replies of round 1."""
    pull, came = QueueTransport.pull, list[Any]()

    def breaking(self: QueueTransport, identities: Any, limit: int) -> Any:
        before = len(came)
        came.extend(found := pull(self, identities, limit))
        if before < answers <= len(came):
            raise TransportError("the end")
        return found

    monkeypatch.setattr(QueueTransport, "pull", breaking)


@pytest.mark.parametrize("answers", [5, 8, 14, 16, 18, 31])
def test_a_run_whose_masks_were_revealed_goes_on(answers: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Three answers each: to enrol, advertise, share, deliver, update and unmask. It ends within the last two."""
    text = method("fedavg", "[secure_aggregation]\n").replace("personal_test = 0.3\n", "")
    interrupt(monkeypatch, answers)
    with own_devices(tmp_path, text) as federation:
        with refuses(TransportError, "the end"):
            federation.run()
        federation.run()
        states = [federation.state(client) for client in range(3)]
        found = reconcile(federation.app / "run", states)
        assert not found.findings
        assert any("drawn again" in remark for remark in found.remarks) == (answers < 12)
        assert not (federation.app / "run" / ANSWERS).exists()
    equal(federation.recipe, federation.app / "run", tmp_path / "one")


@pytest.mark.parametrize("answers", [0, 6])
def test_a_run_with_late_replies_is_certified(answers: int, tmp_path: Path, monkeypatch: Any) -> None:
    """Also if it was interrupted in round 2, while a device worked on the request of round 1."""
    text = method("fedbuff").replace('"fedbuff"', '"fedbuff"\nbuffer = 2').replace("rounds = 2", "rounds = 4")
    text = text.replace("personal_test = 0.3\n", "")
    with own_devices(tmp_path, text) as federation:
        if answers:
            interrupt(monkeypatch, answers)
            with refuses(TransportError, "the end"):
                federation.run()
        federation.run()
        out = federation.app / "run"
        assert any("came" in row for row in ledger(out)), "one of three devices is late"
        certified(federation.credentials, out, [federation.state(client) for client in range(3)])


def test_devices_sign_although_the_run_was_killed_before_they_were_asked(tmp_path: Path, monkeypatch: Any) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    text = method("fedavg").replace("enrol_seconds = 120.0", "enrol_seconds = 2.0")
    with own_devices(tmp_path, text) as federation:
        with monkeypatch.context() as patch:
            patch.setattr("polyfed.deploy.server.server.collect_receipts", killed)
            with pytest.raises(KeyboardInterrupt):
                federation.run()
        out = federation.app / "run"
        before = (out / "result.json").read_bytes()
        federation.run()
        certified(federation.credentials, out, [federation.state(client) for client in range(3)])
        (out / "receipts.json").unlink()
        federation.stop.set()
        federation.run()
    assert (out / "receipts.json").read_text() == "{}", "nobody is there any more, and the run is at its end"
    assert (out / "result.json").read_bytes() == before


def test_noise_of_the_devices_is_booked_once_although_the_run_was_interrupted(tmp_path: Path, monkeypatch: Any) -> None:
    """A device sends the reply with noise that it has sent before."""
    demand = "[require]\nmax_epsilon = 2.5\ndelta = 1e-3\n"
    privacy = '[privacy]\nunit = "client"\nnoise_at = "client"\ndelta = 0.01\nclip_norm = 0.5\nnoise_multiplier = 4.0\n'
    text = method("fedavg", privacy).replace('"fedavg"', '"fedavg"\naggregation = "uniform"')
    interrupt(monkeypatch)
    with own_devices(tmp_path, text.replace("personal_test = 0.3\n", ""), policy=demand) as federation:
        with refuses(TransportError, "the end"):
            federation.run()
        assert federation.run()["privacy"]["epsilon"] > 0
        for client in range(3):
            with sqlite3.connect(federation.state(client) / STORE) as rows:
                assert rows.execute("SELECT unit, times FROM spent").fetchall() == [("client", 2)]
            names = [path.name for path in federation.state(client).iterdir() if RUN_NAME.fullmatch(path.name)]
            assert len(names) == 1, "a server that names a run gets no other file or folder of the device"
        states = [federation.state(client) for client in range(3)]
        certified(federation.credentials, federation.app / "run", states)


def test_a_warm_start_goes_on_after_an_interruption_and_its_model_is_evaluated_on_devices(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "first.toml").write_text(method("ditto").replace("rounds = 2", "rounds = 1"))
    polyfed.run(tmp_path / "first.toml", tmp_path / "first", engine="sequential")
    text = method("ditto").replace("embedding = 6", f'embedding = 6\ninit = "{tmp_path / "first"}"')
    interrupt(monkeypatch)
    with own_devices(tmp_path, text, policy="[limits]\nmin_group = 1\n") as federation:
        with refuses(TransportError, "the end"):
            federation.run()
        federation.run()
        out = federation.app / "run"
        job = federation.run(write_job(job_of(out, None), tmp_path / "job"))["evaluation"]
    equal(federation.recipe, out, tmp_path / "one")
    assert job["pooled"]["support"] == np.sum([site["support"] for site in job["sites"].values()], axis=0).tolist()
    assert set(job["sites"]) == {"0", "1", "2"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_of_real_processes_that_are_killed_gives_what_it_gives_in_one_process(mode: str, tmp_path: Path) -> None:
    text = MODES[mode].replace("rounds = 1", "rounds = 3").replace("rounds = 2", "rounds = 3")
    federation = OwnFederation(tmp_path, 0, together=True, recipe=text, more=more_of(text))
    try:
        federation.began()
        federation.start("run")
        federation.until(lambda: "round 1:" in federation.log("run"), "round 1")
        for victim in ("run", "server", "devices"):
            federation.kill(victim)
            federation.start(victim)
            time.sleep(1.0)
        assert federation.processes["run"].wait(PATIENCE) == 0, federation.log("run")
    finally:
        federation.stop()
    equal(federation.recipe, federation.app / "run", tmp_path / "one")
