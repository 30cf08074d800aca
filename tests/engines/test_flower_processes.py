"""Real processes on loopback: Ray, and a SuperLink with three SuperNodes, TLS and node keys. Slow; `make check-all`.

Every test ends by comparing with the sequential engine, bit for bit, where the same clients answered.
"""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.federations import METHODS, PATIENCE, order, outcome, recipe_for, reference, rows, said, until
from polyfed.deploy import write_app
from polyfed.deploy.credentials import _authority, _secret, _server, write_credentials
from polyfed.deploy.local_federation import LocalFederation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: Any) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    with LocalFederation(recipe_for("fedavg", folder), folder / "fed") as started:
        started.start()
        yield started


@pytest.mark.filterwarnings("ignore")  # Ray's and Flower's own
@pytest.mark.parametrize("method", METHODS)
def test_ray_equals_sequential(method: str, tmp_path: Path) -> None:
    recipe = recipe_for(method, tmp_path)
    run = polyfed.run(recipe, tmp_path / "ray", engine="flower")
    state, ledger = reference(recipe, tmp_path / "one")
    assert run.result["state_sha256"] == state
    assert rows(tmp_path / "ray" / "egress.jsonl") == ledger


@pytest.mark.parametrize("method", METHODS)
def test_three_supernodes_equal_sequential(method: str, federation: LocalFederation, tmp_path: Path) -> None:
    recipe = recipe_for(method, tmp_path)
    app = write_app(recipe, tmp_path / "app")
    federation.run(app).wait(PATIENCE)
    state, ledger = reference(recipe, tmp_path / "one")
    assert outcome(app / "run") == (state, ledger)
    run = json.loads((app / "run" / "run.json").read_text())["run"]
    own = [row for path in federation.folder.glob(f"nodes/*/polyfed-state/{run}/*/egress.jsonl") for row in rows(path)]
    assert sorted(own, key=order) == sorted(ledger, key=order), "what the clients wrote down themselves"


def test_a_clients_own_policy_ends_the_run_with_exit_code_3(federation: LocalFederation, tmp_path: Path) -> None:
    policy = federation.nodes[1] / "policy.toml"
    before = policy.read_text()
    policy.write_text('[egress.gray]\nserver = []\n[egress.shared]\nserver = ["parameters", "statistic"]\n')
    try:
        app = write_app(recipe_for("fedavg", tmp_path), tmp_path / "app")
        federation.run(app).wait(PATIENCE)
        told = json.loads((app / "run" / "error.json").read_text())
    finally:
        policy.write_text(before)
    assert told["exit_code"] == 3
    assert "client 1 refused to send Update.params: parameters of gray" in told["text"]
    assert "[egress.gray] server = " in told["text"]


def test_a_supernode_killed_in_the_middle_of_a_task_comes_back(federation: LocalFederation, tmp_path: Path) -> None:
    recipe = recipe_for("scaffold", tmp_path)
    app = write_app(recipe, tmp_path / "app")
    seen = federation.log("run").count("polyfed: round 1:")
    asked = federation.log("node-1").count("Receiving: train")
    process = federation.run(app)
    until(said(federation, "polyfed: round 1:", seen + 1), "round 1")
    until(lambda: federation.log("node-1").count("Receiving: train") == asked + 2, "the second ask")
    federation.kill("node-1")
    federation.return_node(1)
    process.wait(PATIENCE)
    assert outcome(app / "run") == reference(recipe, tmp_path / "one")


DYING = """
import os, signal
from polyfed.experiment.running import checkpoint
save = checkpoint.save
def last_words(folder, round, *rest):
    if round == 2 and folder.parent.name == "run":
        (folder.parent / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, round, *rest)
checkpoint.save = last_words
"""


def test_a_serverapp_killed_before_its_checkpoint_and_a_superlink_killed_go_on(
    federation: LocalFederation, tmp_path: Path
) -> None:
    recipe = recipe_for("scaffold", tmp_path, rounds=3)
    app = write_app(recipe, tmp_path / "app")
    module = app / "polyfed_app.py"
    whole = module.read_text()
    module.write_text(whole + DYING)
    first = federation.run(app)
    until((app / "run" / "died").exists, "the ServerApp's death")
    assert "round-000001" in (app / "run" / "checkpoint" / "latest.json").read_text()
    module.write_text(whole)
    federation.processes.pop("run")
    first.kill(), first.wait()
    rounds = federation.log("run").count("polyfed: round 2:")
    second = federation.run(app)
    until(said(federation, "polyfed: round 2:", rounds + 1), "round 2 after the ServerApp's death")
    federation.kill("link")
    federation.processes.pop("run")
    second.kill(), second.wait()
    federation.start_link()
    third = federation.run(app)
    third.wait(PATIENCE)
    assert outcome(app / "run") == reference(recipe, tmp_path / "one")


def refused_node(federation: LocalFederation, folder: Path, **changes: str) -> str:
    """What a fourth SuperNode says that is not let in."""
    place = federation.folder / "node-9.log"
    federation.nodes.append(federation.nodes[0])
    federation.held.append(federation.held[0])
    federation.ports.append(federation.ports[-1] + 1)
    number = len(federation.nodes) - 1
    try:
        place.unlink(missing_ok=True)
        federation.start_node(number, **changes)
        name = f"node-{number}"
        words = ("refused the key", "ertificate", "CERTIFICATE", "retrying")
        until(lambda: any(word in federation.log(name) for word in words), "the SuperNode's complaint", 90)
        time.sleep(2.0)
        text = federation.log(name)
        federation.kill(name, signal.SIGKILL)
    finally:
        federation.nodes.pop(), federation.held.pop(), federation.ports.pop()
    (federation.folder / f"{name}.log").unlink()
    return text


def test_a_node_whose_key_is_unknown_stays_out(federation: LocalFederation, tmp_path: Path) -> None:
    stranger = write_credentials(tmp_path / "other", 1)
    text = refused_node(federation, tmp_path, auth_supernode_private_key=f"{stranger}/node-0.key")
    assert "SuperNode ID" not in text
    assert "the server refused the key of this device" in text


def test_a_node_that_trusts_another_authority_does_not_talk_to_the_server(
    federation: LocalFederation, tmp_path: Path
) -> None:
    other = write_credentials(tmp_path / "other", 1)
    key = f"{federation.credentials}/node-0.key"
    text = refused_node(federation, tmp_path, root_certificates=f"{other}/ca.pem", auth_supernode_private_key=key)
    assert "SuperNode ID" not in text


def test_a_superlink_does_not_start_with_an_expired_certificate(tmp_path: Path) -> None:
    recipe = recipe_for("fedavg", tmp_path)
    federation = LocalFederation(recipe, tmp_path / "fed")
    authority, ca = _authority()
    key, expired = _server(authority, ca, ["127.0.0.1"], days=-2)
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    (federation.credentials / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (federation.credentials / "server.pem").write_bytes(expired.public_bytes(Encoding.PEM))
    _secret(federation.credentials / "server.key", key, PrivateFormat.PKCS8)
    with federation, pytest.raises(polyfed.core.errors.RecipeError, match="did not start"):
        federation.start_link()
    assert "server.pem expired on" in federation.log("link")


def test_an_evaluation_job_on_three_supernodes_equals_the_simulation(tmp_path: Path) -> None:
    from polyfed.deploy.app_folder import write_job
    from polyfed.experiment.evaluate import job_of

    recipe = recipe_for("fedavg", tmp_path)
    recipe.write_text(recipe.read_text().replace("num = 3", "num = 3\npersonal_test = 0.3"))
    polyfed.run(recipe, tmp_path / "trained", engine="sequential")
    with LocalFederation(recipe, tmp_path / "fed") as federation:
        for place in federation.nodes:
            policy = place / "policy.toml"
            policy.write_text(policy.read_text() + "\n[limits]\nmin_group = 1\n")
        job = write_job(job_of(tmp_path / "trained", None), tmp_path / "job")
        federation.start()
        federation.run(job).wait(timeout=PATIENCE)
    told = json.loads((tmp_path / "job" / "run" / "result.json").read_text())["evaluation"]
    assert told["pooled"] == json.loads(json.dumps(polyfed.evaluate(tmp_path / "trained").content["pooled"]))
