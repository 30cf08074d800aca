"""Servers that get round the protection which a device demands in the section [require] of its policy file."""

import json
import sqlite3
import tomllib
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import Devices
from federation.test_secure_aggregation import secured, small
from laws.test_laws import world as law_world
from polyfed.algorithms.averaging import Update
from polyfed.algorithms.base import Broadcast
from polyfed.cli import main
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.tree import digest
from polyfed.deploy.device.configuration import node_from
from polyfed.deploy.device.memory.privacy_budget import spend
from polyfed.deploy.device.memory.store import STORE, DeviceStore
from polyfed.deploy.device.recipe_check import inspect
from polyfed.engines.protocol import ENROLLED, FAILED, REFUSED, REPLY, Facts, RequestId, hello, versions
from polyfed.experiment.checks.requirement_checks import release_of, unmet
from polyfed.experiment.recipes.recipe import load_recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.differential.accounting import Accounting, epsilon_of_all
from polyfed.privacy.egress.requirements import Requirements
from refusals import refuses
from world import on_device, through

BASE = """
seed = 3
rounds = {rounds}
[data]
name = "toy"
rows = 240
classes = 4
[clients]
partition = "dirichlet"
num = 3
alpha = 2.0
[model]
embedding = 6
[model.encoders]
a = {{ kind = "mlp", hidden = [8] }}
b = {{ kind = "mlp", hidden = [8] }}
[train]
batch_size = 16
lr = 0.1
{train}
[algorithm]
name = "fedavg"
aggregation = "uniform"
[deployment]
enrol_seconds = 2.0
"""
LOCAL = '[privacy]\nunit = "client"\nnoise_at = "client"\ndelta = 0.01\nclip_norm = 0.5\n'
EXAMPLE = '[privacy]\nunit = "example"\ndelta = 0.001\nclip_norm = 0.5\n'
SECURE = "[secure_aggregation]\nmin_clients = 2\n"
NOISE = "noise_multiplier = 4.0\n"
SPEND = Accounting("rdp", 1e-3, swing=2.0).epsilon(4.0, 2)
"""What two rounds of LOCAL with NOISE spend at the delta of the device."""


def text(sections: str, train: str = "", rounds: int = 2) -> str:
    return BASE.format(rounds=rounds, train=train) + sections


def device(folder: Path, require: str, recipe: str) -> Devices:
    """Three devices, of which the second demands protection."""
    folder.mkdir(exist_ok=True)
    devices = Devices(folder, recipe)
    with (devices.places[1] / "policy.toml").open("a") as file:
        file.write(f"\n[require]\n{require}\n")
    return devices


class Hostile:
    """A server that sends what it likes to the second device."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.parts = assemble(load_recipe(devices.recipe))
        self.owned = self.parts.fed.clients.owned(1)
        self.params = {n: v for n, v in self.parts.initial.items() if n.partition(".")[0] in (*self.owned, "shared")}

    def sends(self, recipe: str) -> None:
        """From now on, the app holds this recipe."""
        (self.devices.app / "recipe.toml").write_text(recipe)

    def enrol(self) -> Packet:
        return self.devices(hello(), {"partition-id": 1})

    def ask(self, round: int = 1, number: int = 0, run: str = "run", params: Any = None) -> Packet:
        columns = self.parts.population.columns
        about = {"task": "update", "seed": 0, "rounds": 2, "turn": 0, "modalities": list(self.owned), "kept": 0}
        shapes = {n: c.shape for n, c in columns.modalities.items()}
        facts = Facts(shapes, columns.num_classes, digest(self.parts.model.frozen))
        header = RequestId(run, 1, round, number, 1).header(want="ask", facts=asdict(facts), **versions(), **about)
        sent = encode(Broadcast(self.params if params is None else params))
        return self.devices(Packet(header | sent.header, sent.body), {"partition-id": 1})


def left(devices: Devices) -> list[Any]:
    """The rows of the second device's ledgers about parts that left it."""
    found = []
    for path in (devices.places[1]).rglob("egress.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if row["destination"] != "client" and row["verdict"] == "allowed"]


def spent_by(place: Path) -> dict[tuple[str, float], int]:
    """The privacy budget of the device in this folder: (unit, noise) -> number of Gaussian mechanisms."""
    with closing(sqlite3.connect(next(place.rglob(STORE)))) as rows:
        return {(unit, noise): times for unit, noise, times in rows.execute("SELECT unit, noise, times FROM spent")}


EPSILON = "max_epsilon = 2.5\ndelta = 1e-3\n"

REFUSALS = [
    ("secure_aggregation = true", text(""), "the recipe has no section [secure_aggregation]"),
    ("secure_aggregation = true\nmin_clients = 3", text(SECURE), "says [secure_aggregation] min_clients = 2"),
    (EPSILON, text(""), "the recipe has no section [privacy]"),
    (EPSILON, text(LOCAL.replace('noise_at = "client"\n', "") + NOISE), "cannot verify the noise of a server"),
    (EPSILON, text(EXAMPLE + NOISE), "which protects single rows"),
    (EPSILON, text(LOCAL + "noise_multiplier = 2.0\n"), "the 2 rounds of the recipe spend"),
    (EPSILON, text(LOCAL + NOISE, rounds=900), "the 900 rounds of the recipe spend"),
    (EPSILON, text(LOCAL.replace("0.01", "0.3") + "epsilon = 2.0\n"), "at delta = 0.001, and the 2 rounds"),
    (EPSILON, text(LOCAL.replace("0.5", "1e-30") + NOISE), "clip_norm = 1e-30, where rounding errors"),
    (EPSILON + 'unit = "example"', text(EXAMPLE + NOISE, "epochs = 90"), "the 2 rounds of the recipe spend"),
    (EPSILON + "secure_aggregation = true", text(LOCAL + NOISE), "the recipe has no section [secure_aggregation]"),
]


@pytest.mark.parametrize(("require", "recipe", "words"), REFUSALS)
def test_a_device_refuses_a_recipe_that_lacks_the_protection(
    require: str, recipe: str, words: str, tmp_path: Path
) -> None:
    """An enrolment under an honest recipe does not help the server, because the device reads each request's recipe."""
    server = Hostile(device(tmp_path, require, text("")))
    server.sends(recipe)
    for answer in (server.enrol(), server.ask()):
        assert answer.header["verdict"] == REFUSED
        assert str(answer.header["reason"]).startswith("client 1 refused the recipe: [require] ")
        assert words in str(answer.header["reason"])
        assert not answer.body
    assert not left(server.devices)


UNREADABLE = [
    (text(LOCAL + NOISE).replace('"fedavg"', '"fedproto"').replace('aggregation = "uniform"', ""), "fedproto"),
    (text(LOCAL + NOISE).replace('"fedavg"', '"cmsfed"'), "gradient_split = 'delta'"),
]


@pytest.mark.parametrize(("recipe", "words"), UNREADABLE)
def test_no_device_reads_a_recipe_whose_method_cannot_honour_its_own_protection(
    recipe: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Hostile(device(tmp_path, EPSILON, text("")))
    server.sends(recipe)
    for answer in (server.enrol(), server.ask()):
        assert answer.header["verdict"] == FAILED
        assert "the recipe cannot be read there" in str(answer.header["reason"])
        assert not answer.body
    assert words in caplog.text
    assert not left(server.devices)


@pytest.mark.parametrize("train", ["steps = 500", "accumulate = 2"])
def test_a_recipe_whose_training_breaks_the_accounting_is_refused(train: str, tmp_path: Path) -> None:
    """The server of a hostile recipe does not check its own section [privacy]; no device can even read it."""
    require = EPSILON.replace("2.5", "9.0") + 'unit = "example"'
    server = Hostile(device(tmp_path, require, text("")))
    server.sends(text(EXAMPLE + NOISE, train))
    answer = server.ask()
    assert answer.header["verdict"] == FAILED
    assert "the recipe cannot be read there" in str(answer.header["reason"])
    assert not left(server.devices)


@pytest.mark.parametrize("epsilon", ["", "epsilon = 2.0\n"])
def test_training_without_epochs_is_refused_before_its_epsilon_is_counted(epsilon: str, tmp_path: Path) -> None:
    """With `epochs = 0`, the accountant would count no use of a row, and `steps` would still use the rows."""
    with pytest.raises(RecipeError) as refused:
        parse_recipe(tomllib.loads(text(EXAMPLE + (epsilon or NOISE), "epochs = 0\nsteps = 5")))
    assert refused.value.key == ("train", "steps")
    required = Requirements(max_epsilon=9.0, delta=1e-3, unit="example")
    made = parse_recipe(tomllib.loads(text(EXAMPLE + (epsilon or NOISE))))
    idle = replace(made, algorithm=replace(made.algorithm, train=replace(made.algorithm.train, epochs=0)))
    assert not list(unmet(required, idle, shared=False)), "without steps, no row is used"
    for _ in range(2):
        with DeviceStore(tmp_path).transaction("run", 0) as memory:
            spend(memory, required, release_of(required, idle))
    assert not spent_by(tmp_path)


def test_a_field_without_protection_is_refused_unless_the_device_accepts_its_kind(tmp_path: Path) -> None:
    """The recipe accepts that the loss crosses unprotected. The device decides about itself."""
    recipe = text(LOCAL + NOISE + 'unprotected = ["statistic"]\n')
    server = Hostile(device(tmp_path / "a", EPSILON, recipe))
    answer = server.ask()
    assert answer.header["verdict"] == REFUSED
    assert "Update.loss (statistic): [require] max_epsilon = 2.5 of the device" in str(answer.header["reason"])
    assert '[require] unprotected = ["statistic"]' in str(answer.header["reason"])
    assert not left(server.devices)
    other = Hostile(device(tmp_path / "b", EPSILON + 'unprotected = ["statistic"]', recipe))
    assert other.ask().header["verdict"] == REPLY


@pytest.mark.parametrize("required", [Requirements(secure_aggregation=True), Requirements(max_epsilon=9.0, delta=0.1)])
@pytest.mark.parametrize("name", ["fedavg", "partialfl", "fedproto", "fedgkt", "splitfed", "cmsfed"])
def test_nothing_without_protection_passes_the_gate(name: str, required: Requirements) -> None:
    """Embeddings, prototypes, gradients, labels and statistics, of methods that send them."""
    parts = on_device(law_world(name), required=required)
    listed = parts.engine.announcement(parts.fed.clients.modalities)
    assert not any(row.allowed for row in listed.rows.values())
    with refuses(EgressError, "[require]"):
        through(parts, 1)
    assert parts.ledger.bytes_up == 0


def test_only_masked_parts_and_keys_pass_the_gate_of_a_device_that_demands_masks() -> None:
    parts = on_device(secured(small()), required=Requirements(secure_aggregation=True))
    rows = parts.engine.announcement(parts.fed.clients.modalities).rows.values()
    assert all(row.allowed for row in rows)
    assert {row.message for row in rows if not row.masked} == {"PublicKeys", "EncryptedShares", "RevealedShares"}
    through(parts, 1)


def test_a_server_cannot_average_away_the_noise_with_repetitions_and_new_runs(tmp_path: Path) -> None:
    """Each run has a new name and asks the same round. The device counts all of them together."""
    server = Hostile(device(tmp_path, f"max_epsilon = {SPEND + 1e-6}\ndelta = 1e-3", text(LOCAL + NOISE)))
    answers = [server.ask(number=number % 2, run=f"run-{number}") for number in range(8)]
    assert [answer.header["verdict"] for answer in answers] == [REPLY] * 2 + [REFUSED] * 6
    assert "would bring all replies of the device in all runs to epsilon" in str(answers[-1].header["reason"])
    assert server.enrol().header["verdict"] == REFUSED
    assert spent_by(server.devices.places[1]) == {("client", 2.0): 2}
    node = dict(server.devices.configs[1])
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in node.items())
    said = inspect(server.devices.recipe, words)
    assert "would bring all replies of the device in all runs to epsilon" in said.breaches[0]
    fine = [decode(a, Update, limit=2**24).params for a in answers[:2]]
    assert all(not torch.equal(fine[0][name], fine[1][name]) for name in fine[0])


def test_a_device_whose_budget_is_enough_for_a_part_of_a_run_does_not_enrol(tmp_path: Path) -> None:
    """It refuses before anything is spent. A run that goes on needs only the rounds that are left of it."""
    devices = device(tmp_path, f"max_epsilon = {SPEND + 1e-6}\ndelta = 1e-3", text(LOCAL + NOISE))
    server = Hostile(devices)
    assert server.ask().header["verdict"] == REPLY
    spent = spent_by(devices.places[1])
    with refuses(EgressError, "rest of this"):
        devices.serve(tmp_path / "run")
    assert spent_by(devices.places[1]) == spent
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in devices.configs[1].items())
    assert "enough for 1 of 2 rounds" in inspect(devices.recipe, words).breaches[0]
    assert devices(hello(rounds_left=1), {"partition-id": 1}).header["verdict"] == ENROLLED
    assert devices(hello(rounds_left=10**9), {"partition-id": 1}).header["verdict"] == REFUSED


def test_a_run_that_goes_on_is_not_refused_for_the_rounds_that_are_done(tmp_path: Path) -> None:
    devices = device(tmp_path, f"max_epsilon = {SPEND + 1e-6}\ndelta = 1e-3", text(LOCAL + NOISE, rounds=1))
    devices.serve(tmp_path / "run")
    app = devices.app / "recipe.toml"
    app.write_text(app.read_text().replace("rounds = 1", "rounds = 2"))
    assert devices.serve(tmp_path / "run")["rounds"] == 2


def test_a_damaged_count_ends_the_replies(tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, EPSILON, text(LOCAL + NOISE)))
    assert server.ask().header["verdict"] == REPLY
    next(server.devices.places[1].rglob(STORE)).write_text("{")
    assert server.ask(number=1).header["verdict"] == "failed"


def test_rows_that_were_protected_alone_do_not_count_as_a_protected_device(tmp_path: Path) -> None:
    devices = device(tmp_path, EPSILON + 'unit = "example"', text(EXAMPLE + NOISE))
    server = Hostile(devices)
    assert server.ask().header["verdict"] == REPLY
    policy = devices.places[1] / "policy.toml"
    policy.write_text(policy.read_text().replace('unit = "example"', ""))
    server.sends(text(LOCAL + NOISE))
    answer = server.ask(run="other")
    assert answer.header["verdict"] == REFUSED
    assert "earlier replies of the device protected single rows only" in str(answer.header["reason"])


def test_noise_for_the_whole_device_also_protects_its_rows(tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, EPSILON + 'unit = "example"', text(LOCAL + NOISE)))
    assert server.ask().header["verdict"] == REPLY


@pytest.mark.parametrize("sections", [LOCAL, EXAMPLE], ids=["client", "example"])
def test_a_model_that_makes_training_overflow_tells_nothing(sections: str, tmp_path: Path) -> None:
    """Gradients of rows overflow, and infinity times the factor of the clipping is NaN, which no noise hides."""
    server = Hostile(device(tmp_path, EPSILON + 'unit = "example"', text(sections + NOISE)))
    answer = server.ask(params={n: torch.full_like(v, 1e25) for n, v in server.params.items()})
    assert answer.header["verdict"] == REPLY
    reply = decode(answer, Update, limit=2**24)
    assert all(bool(value.isfinite().all()) for value in reply.params.values())


def test_a_model_in_half_precision_is_refused(tmp_path: Path) -> None:
    server = Hostile(device(tmp_path, EPSILON, text(LOCAL + NOISE)))
    answer = server.ask(params={n: v.to(torch.bfloat16) for n, v in server.params.items()})
    assert answer.header["verdict"] == "failed"
    assert "is torch.bfloat16 (8, 16), expected torch.float32" in str(answer.header["reason"])


@pytest.mark.parametrize(
    ("require", "sections"),
    [
        ("secure_aggregation = true\nmin_clients = 2", SECURE),
        (EPSILON, LOCAL + NOISE),
        (EPSILON + 'unit = "example"', EXAMPLE + NOISE),
    ],
)
def test_a_recipe_with_the_protection_runs(require: str, sections: str, tmp_path: Path) -> None:
    devices = device(tmp_path, require, text(sections))
    assert devices.serve(tmp_path / "run")["rounds"] == 2
    assert left(devices)


def test_a_run_ends_with_the_words_of_the_device(tmp_path: Path) -> None:
    with refuses(EgressError, "max_epsilon = 2.5"):
        device(tmp_path, EPSILON, text("")).serve(tmp_path / "run")


def test_check_node_says_what_the_recipe_lacks(tmp_path: Path, capsys: Any) -> None:
    devices = device(tmp_path, EPSILON, text(""))
    place = devices.places[1]
    config = f'data="{place}/data.npz" client=1 modalities="a,b" policy="{place}/policy.toml"'
    for words in (("--node", config), ("--node", f"{place}/policy.toml")):
        with pytest.raises(SystemExit) as stop:
            main(("check", str(devices.recipe), *words))
        assert stop.value.code == 3
        told = " ".join(capsys.readouterr().out.split())
        assert "[require] max_epsilon = 2.5 (of the device)" in told
        assert "would be refused by [require] max_epsilon = 2.5 of the device, and the recipe has no section" in told
    with pytest.raises(SystemExit):
        main(("check", str(devices.recipe), "--node", config, "--json"))
    said = json.loads(capsys.readouterr().out)
    assert said["required"] == ["max_epsilon = 2.5", "delta = 0.001", "unit = client"]
    assert len(said["breaches"]) == 1
    assert not any(row["allowed"] for row in said["planned"] if row["kind"] == "parameters")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("max_epsilon = 1.0", "require.delta: max_epsilon"),
        ("delta = 0.1", "require.delta: max_epsilon"),
        ("min_clients = 3", "require.min_clients: secure_aggregation"),
        ("max_epsilon = -1.0\ndelta = 0.1", "require.max_epsilon: above 0"),
        ("secure_agregation = true", "require.secure_agregation: mean 'secure_aggregation'"),
        ('unprotected = ["loss"]', "require.unprotected: no kind 'loss'"),
        ('unit = "row"', "require.unit: 'client' or 'example'"),
    ],
)
def test_the_section_is_checked(lines: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f"[require]\n{lines}\n")
    node = node_from(f'data="x.npz" client=0 modalities="a" policy="{tmp_path}/policy.toml"')
    with refuses(RecipeError, words):
        node.rules  # noqa: B018


def test_the_epsilon_of_a_device_is_that_of_the_library() -> None:
    assert epsilon_of_all({2.0: 2}, 1e-3) == SPEND
    assert epsilon_of_all({}, 1e-3) == epsilon_of_all({2.0: 0}, 1e-3) == 0.0
    assert epsilon_of_all({2.0: 2, 3.0: 0}, 1e-3) == SPEND
    mixed = epsilon_of_all({2.0: 2, 1.0: 1}, 1e-3)
    assert max(SPEND, epsilon_of_all({1.0: 1}, 1e-3)) < mixed
    # Gaussian mechanisms compose to one with the root of the sum of their inverse squared noise
    assert mixed == pytest.approx(epsilon_of_all({(2 / 4 + 1) ** -0.5: 1}, 1e-3))


def test_the_defaults_demand_nothing() -> None:
    assert Requirements().sentences() == ()
