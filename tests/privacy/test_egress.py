"""The boundary: what may not leave does not, and what leaves is what the ledger says."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from leaky import OPEN, Leaky
from polyfed.algorithms.averaging import Update
from polyfed.core.errors import EgressError, RecipeError, TooFewReplies
from polyfed.core.messages import Crossing, Message, crossings
from polyfed.experiment.checks.check import plan, refuse_forbidden
from polyfed.experiment.running.assembly import assemble
from polyfed.privacy.egress import policy as policies
from polyfed.privacy.egress.gate import EgressGate
from polyfed.privacy.egress.ledger import Ledger
from polyfed.privacy.egress.policy import Policy
from refusals import refuses
from world import algorithm, played, recipe

ENGINES = ["sequential", "vectorised"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("block", "kind", "words"),
    [
        (
            "a",
            "raw",
            "raw of a may not go to the server. It would leave if the client's policy said: [egress.a] server",
        ),
        ("b", "embeddings", "embeddings of b may not go"),
        ("labels", "labels", '[egress.labels] server = ["labels"]'),
    ],
)
def test_a_forbidden_field_is_refused_by_name(engine: str, block: str, kind: str, words: str) -> None:
    table = {row: {"server": [k for k in kinds["server"] if (row, k) != (block, kind)]} for row, kinds in OPEN.items()}
    with pytest.raises(EgressError) as refused:
        played(recipe(Leaky(), engine, egress=table))
    assert words in str(refused.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_an_open_policy_the_leak_shows_in_the_ledger(engine: str) -> None:
    rows = played(recipe(Leaky(), engine, egress=OPEN))[2]
    assert {(r["block"], r["kind"]) for r in rows} >= {("a", "raw"), ("b", "embeddings"), ("labels", "labels")}
    assert all(r["verdict"] == "allowed" for r in rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_refused_reply_reaches_no_server_code_and_counts_no_bytes(engine: str, monkeypatch: Any) -> None:
    parts = assemble(recipe(Leaky(), engine))
    seen: list[Any] = []
    monkeypatch.setattr(type(parts.fed), "_inspect", lambda *args: seen.append(args))
    parts.fed.begin(1)
    with pytest.raises(EgressError):
        parts.algorithm.round(parts.algorithm.init(parts.fed, parts.initial), parts.fed)
    assert not seen
    assert parts.ledger.bytes_up == 0
    assert {r["verdict"] for r in parts.ledger.rows() if r["destination"] == "server"} == {"refused"}


def test_a_run_that_would_be_refused_stops_before_training() -> None:
    with refuses(EgressError, "Leak.targets"):
        refuse_forbidden(assemble(recipe(Leaky())))


def test_a_refusal_names_the_private_block_that_would_train_without_leaving() -> None:
    table = {"a": {"server": []}, "shared": {"server": ["parameters", "statistic"]}}
    with refuses(EgressError, '["a"]'):
        refuse_forbidden(assemble(recipe(algorithm("fedavg"), egress=table)))
    kept = recipe(algorithm("fedavg", private=("a",)), egress=table)
    refuse_forbidden(assemble(kept))
    with pytest.raises(EgressError) as refused:  # FedProto has no private blocks
        refuse_forbidden(assemble(recipe(algorithm("fedproto"), egress=table)))
    assert "private" not in str(refused.value)


def test_check_lists_every_field_and_block_that_a_run_then_sends() -> None:
    parts = assemble(recipe(Leaky(), egress=OPEN))
    planned = {(row.message, row.field, row.kind, row.block, row.destination) for row in plan(parts)}
    sent = played(recipe(Leaky(), egress=OPEN))[2]
    crossed = {(r["message"], r["field"], r["kind"], r["block"], r["destination"]) for r in sent}
    assert {row for row in crossed if row[-1] == "server"} == planned


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "moon", "local"])
def test_canary_values_of_labels_and_data_leave_in_no_reply(engine: str, name: str, monkeypatch: Any) -> None:
    canary = 7.7777e5
    sent: list[Tensor] = []
    original = EgressGate.release

    def spy(self: EgressGate, request: Any, reply: Message, **how: Any) -> Message:
        out = original(self, request, reply, **how)
        for field in out.kinds:
            value = getattr(out, field)
            sent.extend([value] if isinstance(value, Tensor) else value.values())
        return out

    monkeypatch.setattr(EgressGate, "release", spy)
    parts = assemble(recipe(algorithm(name), engine, rounds=1))
    values = parts.engine.columns.modalities["b"].values
    # a value no computation would make by itself, in a feature that is then multiplied by 1 everywhere it is copied
    values[:, 0] = canary
    state = parts.start()
    parts.fed.begin(1)
    with suppress(TooFewReplies):  # such inputs may make training diverge; what matters is what left
        parts.algorithm.round(state, parts.fed)
    labels = parts.engine.columns.label.float()
    assert sent
    for tensor in sent:
        flat = tensor.float().flatten()
        assert not bool((flat == canary).any())
        one_hot = torch.nn.functional.one_hot(parts.engine.columns.label).float()
        assert not (
            tensor.dim() > 1 and tensor.shape[-1] == one_hot.shape[-1] and bool((tensor == one_hot[0]).all(-1).any())
        )
        for client in range(len(parts.fed.clients)):
            own = labels[parts.population.train[client]]
            assert not (len(flat) == len(own) and torch.equal(flat, own))


def test_default_policy_lets_parameters_gradients_and_statistics_out_and_nothing_else() -> None:
    policy = Policy()
    allowed = {
        kind
        for kind in ("parameters", "gradients", "statistic", "embeddings", "raw", "ids", "prototypes", "predictions")
        if policy.allows(kind, "audio", "server")
    }
    assert allowed == {"parameters", "gradients", "statistic"}
    assert not any(policy.allows("labels", "labels", place) for place in ("server", "silo"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"adio": {"server": []}}, "no row 'adio'; did you mean 'audio'"),
        ({"audio": {"sever": []}}, "no destination 'sever'; did you mean 'server'"),
        ({"audio": {"server": ["parameter"]}}, "no kind 'parameter'; did you mean 'parameters'"),
        ({"audio": {"server": "parameters"}}, 'must be a list, as in ["parameters"]'),
    ],
)
def test_a_misspelt_policy_names_the_nearest_word(table: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        Policy.parse(table, ["audio", "text"])
    assert words in str(error.value)


def test_a_recipe_can_only_narrow_a_clients_own_policy() -> None:
    own = Policy.parse({"audio": {"server": ["parameters", "embeddings"]}}, ["audio"])
    asked = Policy.parse({"audio": {"server": ["parameters", "raw"]}}, ["audio"])
    both = own.stricter(asked)
    assert both.kinds("audio", "server") == {"parameters"}
    assert both.kinds("text", "server") == policies.DEFAULT
    written = Policy.parse({"shared": {"server": ["parameters", "gradients", "statistic"]}}, ["audio"])
    assert own.stricter(written).kinds("shared", "server") == {"parameters"}, "a recipe's row cannot widen the default"


def test_shared_inherits_the_strictest_row_of_the_modalities_that_a_client_owns() -> None:
    table = {"audio": {"server": ["parameters", "raw"]}, "text": {"server": ["statistic"], "silo": []}}
    policy = Policy.parse(table, ["audio", "text"])
    assert policy.kinds("shared", "server") == frozenset()
    assert policy.for_client(["audio"]).kinds("shared", "server") == {"parameters"}, "raw is not inherited"
    assert policy.for_client(["audio"]).kinds("shared", "silo") == policies.DEFAULT
    assert policy.for_client(["text"]).kinds("shared", "silo") == frozenset()
    own_row = Policy.parse(table | {"shared": {"server": ["parameters"]}}, ["audio", "text"])
    assert own_row.kinds("shared", "server") == {"parameters"}, "a row that is written decides alone"
    assert "[egress.text] server forbids it" in policy.inherited(("parameters",), "shared", "server")
    assert own_row.inherited(("statistic",), "shared", "server") == ""


def test_a_whole_model_may_go_where_every_block_may() -> None:
    assert Policy().allows_models("server")
    rows = {"labels": {"server": []}, "audio": {"silo": []}}
    assert Policy.parse(rows, ["audio", "text"]).allows_models("server")
    assert not Policy.parse(rows, ["audio", "text"]).allows_models("silo")
    assert not Policy.parse({"shared": {"server": ["statistic"]}}, ["audio"]).allows_models("server")


def test_a_message_is_split_by_block() -> None:
    reply = Update(
        {"audio.w": torch.zeros(2, 3), "audio.b": torch.zeros(2), "shared.b": torch.zeros(4)},
        torch.zeros(()),
        torch.tensor(5),
    )
    found = {(c.field, c.block): (c.kind, c.shape, c.bytes) for c in crossings(reply)}
    assert found == {
        ("params", "audio"): ("parameters", (8,), 32),
        ("params", "shared"): ("parameters", (4,), 16),
        ("loss", "shared"): ("statistic", (), 4),
        ("num_rows", "shared"): ("statistic", (), 8),
    }


def test_ledger_rows_come_in_the_same_order_whatever_the_order_of_booking() -> None:
    from polyfed.privacy.egress.ledger import Entry, lines

    crossing = (Crossing("params", "parameters", "audio", "float32", (2,), 8),)
    down = Entry(1, 0, (0, 1), "Broadcast", crossing, "client", (True,))
    up = [Entry(1, 0, (k,), "Update", crossing, "server", (True,)) for k in (1, 0)]
    assert list(lines([*up, down], "r")) == list(lines([down, *reversed(up)], "r"))
    ledger = Ledger("r")
    for entry in (down, *up):
        ledger.book(entry)
    assert (ledger.bytes_up, ledger.bytes_down) == (16, 16)
