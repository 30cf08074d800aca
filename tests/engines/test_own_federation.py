"""A server and its devices as real processes on loopback, with TLS and keys. Slow; `make check-all`.

Every run that ends is compared with the sequential engine, bit for bit, where the same clients answered.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.federations import METHODS, PATIENCE, Federation, order, outcome, recipe_for, reference, rows, said, until
from polyfed.core.errors import RecipeError, TransportError
from polyfed.deploy import write_app
from polyfed.deploy.credentials import _authority, _secret, _server, write_credentials
from refusals import refuses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: Any) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("federation")
    with Federation(recipe_for("fedavg", folder), folder / "fed") as started:
        started.start()
        yield started


@pytest.mark.parametrize("method", METHODS)
def test_three_devices_equal_sequential(method: str, federation: Federation, tmp_path: Path) -> None:
    recipe = recipe_for(method, tmp_path)
    app = write_app(recipe, tmp_path / "app")
    assert federation.run(app).wait(PATIENCE) == 0
    state, ledger = reference(recipe, tmp_path / "one")
    assert outcome(app / "run") == (state, ledger)
    run = json.loads((app / "run" / "run.json").read_text())["run"]
    own = [row for path in federation.folder.glob(f"nodes/*/polyfed-state/{run}/*/egress.jsonl") for row in rows(path)]
    assert sorted(own, key=order) == sorted(ledger, key=order), "what the clients wrote down themselves"


def test_a_clients_own_policy_ends_the_run_with_exit_code_3(federation: Federation, tmp_path: Path) -> None:
    policy = federation.nodes[1] / "policy.toml"
    before = policy.read_text()
    policy.write_text('[egress.gray]\nserver = []\n[egress.shared]\nserver = ["parameters", "statistic"]\n')
    try:
        app = write_app(recipe_for("fedavg", tmp_path), tmp_path / "app")
        assert federation.run(app).wait(PATIENCE) == 3
        told = json.loads((app / "run" / "error.json").read_text())
    finally:
        policy.write_text(before)
    assert told["exit_code"] == 3
    assert told["text"].startswith("client 1 refused to ")
    assert "[egress.gray] " in told["text"], "what would allow it"


DYING = """
import os, signal
from polyfed.experiment.running import checkpoint
save = checkpoint.save
def last_words(folder, round, *rest):
    if round == 2 and folder.parent.name == "run":
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, round, *rest)
checkpoint.save = last_words
"""


def test_a_run_killed_before_its_checkpoint_goes_on(federation: Federation, tmp_path: Path) -> None:
    """Its devices have kept the states of a round that the server does not know."""
    recipe = recipe_for("scaffold", tmp_path, rounds=3)
    app = write_app(recipe, tmp_path / "app")
    assert federation.run(app, changed=DYING).wait(PATIENCE) == -9
    assert "round-000001" in (app / "run" / "checkpoint" / "latest.json").read_text()
    assert federation.run(app).wait(PATIENCE) == 0
    assert outcome(app / "run") == reference(recipe, tmp_path / "one")


def test_a_device_that_dies_before_it_has_enrolled_is_asked_when_it_is_back(
    federation: Federation, tmp_path: Path
) -> None:
    recipe = recipe_for("fedavg", tmp_path)
    app = write_app(recipe, tmp_path / "app")
    seen = federation.log("run").count("2 of 3 enrolled")
    federation.kill("device-1")
    run = federation.run(app)
    until(said(federation, "2 of 3 enrolled", seen + 1), "the other devices")
    federation.start_device(1)
    assert run.wait(PATIENCE) == 0
    assert outcome(app / "run") == reference(recipe, tmp_path / "one")


def test_devices_that_the_server_does_not_know_or_that_do_not_know_it_end_with_a_sentence(
    federation: Federation, tmp_path: Path
) -> None:
    other = write_credentials(tmp_path / "other", 1)
    own = federation.tables[0]
    federation.nodes.append(tmp_path)
    federation.tables.append(own | {"key": str(other / "node-0.key"), "state": str(tmp_path / "state")})
    name = f"device-{len(federation.tables) - 1}"
    try:
        federation.start_device(len(federation.tables) - 1)
        assert federation.processes.pop(name).wait(PATIENCE) == TransportError.exit_code
        federation.start_device(len(federation.tables) - 1, ca=str(other / "ca.pem"))
        assert federation.processes.pop(name).wait(PATIENCE) == TransportError.exit_code
    finally:
        federation.nodes.pop(), federation.tables.pop()
    stranger, lost = (line for line in federation.log(name).splitlines() if " ERROR " in line)
    assert "the server does not know" in stranger or "refuse" in stranger
    assert "ca.pem" in lost


def test_a_server_does_not_start_with_an_expired_certificate(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    federation = Federation(recipe_for("fedavg", tmp_path), tmp_path / "fed")
    authority, ca = _authority()
    key, expired = _server(authority, ca, ["127.0.0.1"], days=-2)
    (federation.credentials / "ca.key").unlink()
    (federation.credentials / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (federation.credentials / "server.pem").write_bytes(expired.public_bytes(Encoding.PEM))
    _secret(federation.credentials / "server.key", key, PrivateFormat.PKCS8)
    with federation, refuses(RecipeError, "did not start"):
        federation.start_server()
    assert "server.pem expired on" in federation.log("server")


def test_an_evaluation_job_on_three_devices_equals_the_simulation(tmp_path: Path) -> None:
    from polyfed.deploy.app_folder import write_job
    from polyfed.experiment.evaluate import job_of

    recipe = recipe_for("fedavg", tmp_path)
    recipe.write_text(recipe.read_text().replace("num = 3", "num = 3\npersonal_test = 0.3"))
    polyfed.run(recipe, tmp_path / "trained", engine="sequential")
    with Federation(recipe, tmp_path / "fed") as federation:
        for place in federation.nodes:
            policy = place / "policy.toml"
            policy.write_text(policy.read_text() + "\n[limits]\nmin_group = 1\n")
        job = write_job(job_of(tmp_path / "trained", None), tmp_path / "job")
        federation.start()
        federation.run(job).wait(timeout=PATIENCE)
    told = json.loads((tmp_path / "job" / "run" / "result.json").read_text())["evaluation"]
    assert told["pooled"] == json.loads(json.dumps(polyfed.evaluate(tmp_path / "trained").content["pooled"]))
