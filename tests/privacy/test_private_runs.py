"""Whole runs under [privacy]: engines agree, runs resume and stop at their budget, and refusals name the reason."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from laws.rows import ROWS
from laws.test_laws import world as law_world
from polyfed.algorithms import ALGORITHMS, Averaging, FedAvg
from polyfed.algorithms.averaging import Update
from polyfed.core.errors import RecipeError
from polyfed.core.messages import KINDS as KINDS_OF_DATA
from polyfed.core.messages import Message
from polyfed.core.tree import digest
from polyfed.deploy.handlers import runtime_of
from polyfed.engines import in_process, stack_division
from polyfed.engines.protocol import Facts
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.checks.check import check, plan
from polyfed.experiment.checks.privacy_support import withheld_of
from polyfed.experiment.checks.protection import mechanism_of
from polyfed.experiment.recipes.recipe import Recipe, load_recipe, parse_recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.results.run_result import Run
from polyfed.experiment.running.assembly import assemble
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.objective import Classification
from polyfed.privacy.differential.accounting import Accounting
from polyfed.privacy.differential.guarantee import number as epsilon_in_words
from polyfed.privacy.differential.section import Privacy
from polyfed.report import write_report
from polyfed.report.formatting import number_of
from polyfed.selection import Uniform
from polyfed.selection.power_of_choice import PowD
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, furthest, played, recipe, same, through

CLIENT = {"unit": "client", "delta": 0.01, "noise_multiplier": 0.7, "clip_norm": 0.5}
EXAMPLE = {"unit": "example", "delta": 0.001, "noise_multiplier": 0.9, "clip_norm": 0.5}

CMSFED = ("prototypes", "statistic")

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "central": ("fedavg", {}, CLIENT),
    "central-per-block": (
        "fedavg",
        {"server": ServerOptimiser(optimiser="adam", lr=0.1)},
        CLIENT | {"clip": "per-block"},
    ),
    "local": ("fedavg", {}, CLIENT | {"noise_at": "client"}),
    "example": ("fedavg", {}, EXAMPLE),
    "example-moon": ("moon", {"projection": 8}, EXAMPLE | {"clip": "per-block"}),
    "example-scaffold": ("scaffold", {}, EXAMPLE),
    "client-scaffold": ("scaffold", {}, CLIENT | {"unprotected": ("gradients",)}),
    "private-blocks": ("fedprox", {"private": ("a",)}, CLIENT),
    "cmsfed": ("cmsfed", {"gradient_split": "exact"}, CLIENT | {"unprotected": (*CMSFED, "gradients")}),
    "cmsfed-local": (
        "cmsfed",
        {"gradient_split": "exact"},
        CLIENT | {"unprotected": (*CMSFED, "gradients"), "noise_at": "client"},
    ),
    "cmsfed-unselected": ("cmsfed", {"modality_selection": False}, CLIENT | {"unprotected": CMSFED}),
}


def private(kind: str = "central", engine: Any = "sequential", **changes: Any) -> Recipe:
    name, options, privacy = KINDS[kind]
    privacy = privacy | {key: changes.pop(key) for key in list(changes) if key in Privacy.__dataclass_fields__}
    method = algorithm(name, **({"aggregation": "uniform"} | options | changes.pop("options", {})))
    return recipe(method, engine, privacy=Privacy(**privacy), egress=ROWS[name].egress, **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_in_parameters_local_states_and_ledgers(kind: str) -> None:
    one, state_one, ledger_one = played(private(kind, rounds=2))
    many, state_many, ledger_many = played(private(kind, "vectorised", rounds=2))
    assert furthest(state_one.params, state_many.params) < 1e-4
    for client, tree in one.engine.locals.items():
        assert furthest(tree, many.engine.locals[client]) < 1e-3
    assert ledger_one == ledger_many
    planned = {(row.message, row.field, row.block) for row in plan(one)}
    assert {(r["message"], r["field"], r["block"]) for r in ledger_one if r["destination"] != "client"} <= planned


DECLARED = [
    (name, unit) for name, cls in sorted(ALGORITHMS.items()) for unit in ("client", "example") if cls.honours(unit)
]


@pytest.mark.parametrize(("name", "unit"), DECLARED)
def test_every_method_that_declares_a_unit_runs_under_it(name: str, unit: str) -> None:
    options = {"clip_norm": 0.01, "unprotected": KINDS_OF_DATA}
    made = law_world(name, aggregation="uniform", **ALGORITHMS[name].private_options)
    made = replace(made, rounds=1, privacy=Privacy(**(CLIENT if unit == "client" else EXAMPLE) | options))
    parts, seen = assemble(made), []

    def watch(send: Any, replies: Any) -> None:
        for client, reply in replies.items():
            sent = send if isinstance(send, Message) else send[client]
            if client >= 0 and getattr(reply, "params", None):
                apart = [(value - sent.params[key]).flatten() for key, value in reply.params.items()]
                seen.append(float(torch.cat(apart).norm()))

    with parts.fed.watched(watch):
        state = through(parts, 1)
    assert all(bool(value.isfinite().all()) for value in state.params.values())
    assert seen
    if unit == "client":
        assert max(seen) <= 0.01 * (1 + 1e-3)


@pytest.mark.parametrize("kind", ["central", "local", "example"])
def test_the_number_of_workers_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "UNIT_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "STACK_FLOPS", 1.0)
    monkeypatch.setattr(stack_division, "LEAST_STACK", 2)
    found = []
    for workers in (1, 2, 3):
        parts = assemble(private(kind, EngineSpec(name="vectorised", workers=workers), rounds=1))
        try:
            found.append(through(parts, 1).params)
        finally:
            parts.engine.close()
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("kind", ["central", "example", "cmsfed"])
def test_a_resumed_run_draws_the_same_noise(kind: str, tmp_path: Path) -> None:
    uninterrupted(private(kind), tmp_path)


def uninterrupted(made: Recipe, folder: Path) -> Run:
    """Check that a run that was cut after round 2 and resumed equals the uninterrupted one; return the latter."""
    whole = polyfed.run(made, folder / "whole")
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, folder / "cut", listeners=[_interrupt])
    again = polyfed.run(made, folder / "cut", resume=True)
    assert again.result["state_sha256"] == whole.result["state_sha256"]
    assert again.result["privacy"] == whole.result["privacy"]
    return whole


def _interrupt(event: str, **facts: Any) -> None:
    if event == "round-finished" and facts["row"]["round"] == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["central", "local", "example"])
def test_the_mechanism_changes_the_model(kind: str) -> None:
    made = private(kind, rounds=1)
    one, plain = (played(m)[1].params for m in (made, replace(made, privacy=None)))
    assert furthest(one, plain) > 1e-2


def test_the_same_seed_gives_the_same_noise_and_another_seed_other_noise() -> None:
    first, again, other = (played(private(seed=seed))[1].params for seed in (1, 1, 2))
    assert same(first, again)
    assert not same(first, other)


def test_a_run_stops_at_its_budget_with_a_valid_result(tmp_path: Path) -> None:
    accounting = Accounting("rdp", 0.01)
    budget = accounting.epsilon(0.7, 3) + 0.01
    made = private(rounds=9, epsilon=budget)
    run = polyfed.run(made, tmp_path)
    assert len(run.rounds) == run.result["rounds"] == 3
    spent = run.result["privacy"]
    assert spent["epsilon"] == accounting.epsilon(0.7, 3) <= budget
    assert spent["stopped"].startswith("The run stops after round 3 of 9, because its privacy budget is spent")
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [line["privacy"]["epsilon"] for line in lines] == [accounting.epsilon(0.7, k) for k in (1, 2, 3)]
    page = write_report(tmp_path).read_text()
    assert "Differential privacy" in page
    assert "its privacy budget is spent" in page
    assert polyfed.load_run(tmp_path).result["privacy"] == json.loads(json.dumps(spent))
    again = polyfed.run(made, tmp_path, resume=True)
    assert len(again.rounds) == 3


def test_check_says_before_the_run_what_the_run_spends() -> None:
    made = private("central-per-block", epsilon=4.0, noise_multiplier=None)
    said, run = check(made), polyfed.run(made)
    assert said.privacy == run.result["privacy"]
    assert said.privacy is not None
    assert 3.9 < said.privacy["epsilon"] <= 4.0
    noise, guarantee = said.privacy["noise_multiplier"], assemble(made).guarantee
    assert said.privacy["blocks"]["a"] == {"parameters": said.privacy["epsilon"]}, "rounds depend on all blocks"
    assert guarantee is not None
    assert guarantee.epsilon(1, "a") == pytest.approx(Accounting("rdp", 0.01).epsilon(noise * 3**0.5, 1))
    assert any(text.startswith("Withheld, so clients send zeros: Update.loss") for text in said.promises)


def test_joint_clipping_spends_the_total_on_every_block() -> None:
    facts = polyfed.run(private()).result["privacy"]
    assert {kinds["parameters"] for kinds in facts["blocks"].values()} == {facts["epsilon"]}


def test_what_counts_for_each_unit() -> None:
    def counted(kind: str, **changes: Any) -> Any:
        guarantee = assemble(private(kind, **changes)).guarantee
        assert guarantee is not None
        return guarantee.accounting

    assert counted("central") == Accounting("rdp", 0.01)
    assert counted("local") == Accounting("rdp", 0.01, swing=2.0)
    assert counted("example") == Accounting("rdp", 0.001, uses=2)  # two epochs
    assert counted("central", amplification=True) == Accounting("rdp", 0.01, swing=2.0, cohort=(4, 6))


def test_a_block_has_its_own_epsilon_only_in_the_first_round_of_whole_clients() -> None:
    """A row changes one step directly. A later step reads all blocks that this step has released."""
    one_epoch = {"options": {"train": Train(lr=0.1, batch_size=16, epochs=1)}}
    rows, clients = (
        assemble(private(kind, clip="per-block", **one_epoch)).guarantee for kind in ("example", "central-per-block")
    )
    assert rows is not None
    assert clients is not None
    assert rows.accounting.uses == 1
    assert rows.epsilon(1, "a") == rows.epsilon(1)
    assert clients.epsilon(1, "a") < clients.epsilon(1)
    assert clients.epsilon(2, "a") == clients.epsilon(2)


def test_a_deployment_refuses_amplification_because_the_cohorts_are_no_secret() -> None:
    made = private("central", amplification=True)
    assert assemble(made).guarantee is not None
    with refuses(RecipeError, "privacy.amplification: request holds"):
        assemble(made, deployed=True)


def test_clients_withhold_the_same_fields_everywhere() -> None:
    """A selector that reads replies keeps them. Without it, clients fill the fields for the log with zeros."""
    plain, reading = algorithm("fedavg"), algorithm("fedavg", selector=PowD(participation=2))
    assert withheld_of(plain) == ("update.loss", "update.num_rows")
    assert withheld_of(plain, ("statistic",)) == withheld_of(reading) == ()


def test_denominators_are_constants_of_the_registry() -> None:
    parts = assemble(private())
    mechanism = parts.fed.privacy
    assert mechanism is not None
    registry = parts.fed.clients
    for place, name in enumerate(registry.modalities):
        assert mechanism.denominators[name] == pytest.approx(max(1.0, 4 / 6 * int(registry.holds[:, place].sum())))
    assert mechanism.denominators["shared"] == pytest.approx(4.0)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_clients_clip_and_withhold_before_the_gate(engine: str) -> None:
    parts = assemble(private(engine=engine, clip_norm=0.05))
    fed, method = parts.fed, parts.algorithm
    assert isinstance(method, Averaging)
    fed.begin(1)
    state = method.init(fed, parts.initial)
    got: dict[int, Update] = dict(fed.ask(method.update, range(6), method.outgoing(state, [], fed)))
    assert len(got) == 6
    for reply in got.values():
        apart = torch.cat([(v - state.params[n]).flatten() for n, v in reply.params.items()])
        assert float(apart.norm()) == pytest.approx(0.05, rel=1e-3)
        assert float(reply.loss) == float(reply.num_rows) == 0.0


def test_accepting_statistics_sends_them() -> None:
    parts, state, _ = played(private(unprotected=("statistic",)))
    assert state.train_loss > 0
    assert parts.guarantee is not None
    facts = parts.guarantee.facts(3)
    assert facts["blocks"]["shared"]["statistic"] is None
    assert {part["field"] for part in facts["unprotected"]} == {"loss", "num_rows"}
    assert any("NOT PROTECTED: Update.loss" in text for text in parts.guarantee.sentences())


def test_devices_and_deployed_servers_draw_from_the_system(tmp_path: Path) -> None:
    made = private("local")
    parts = assemble(made)
    columns = parts.population.columns
    shapes = {name: column.shape for name, column in columns.modalities.items()}
    facts = Facts(shapes, columns.num_classes, digest(parts.model.frozen))
    for relay, secure in ((False, True), (None, False)):
        runtime = runtime_of(parts.recipe, parts.population, facts, parts.policy, tmp_path, relay=relay)
        assert runtime.engine.privacy == replace(parts.fed.privacy, denominators={}, secure=secure)  # type: ignore[type-var]
    made = private("central")

    first, again = (through(assemble(made, deployed=True), 2).params for _ in range(2))
    assert not same(first, again)


def test_a_device_needs_the_library_only_for_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made = private("local")
    parts = assemble(made)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for privacy in ({"epsilon": None}, {"epsilon": 987.0, "noise_at": "server", "noise_multiplier": None}):
        mechanism_of(private("local", **privacy), parts.model, parts.initial, None, secure=True)
    for noise in (None, 0.9):  # to find the noise, or the number of replies that fit the budget
        own = private("local", epsilon=987.0, noise_multiplier=noise)
        with refuses(RecipeError, "needs dp-accounting"):
            mechanism_of(own, parts.model, parts.initial, None, secure=True)


def test_a_device_finds_the_noise_from_the_recipe_alone() -> None:
    made = private("local", epsilon=3.0, noise_multiplier=None)
    parts = assemble(made)
    own = mechanism_of(made, parts.model, parts.initial, None, secure=True)
    assert parts.fed.privacy is not None
    assert own.noise_multiplier == parts.fed.privacy.noise_multiplier > 0


class Leaky(FedAvg):
    """A method of one's own that changes what the server does with the updates."""

    def merge(self, state: Any, replies: Any, fed: Any) -> Any:
        return super().merge(state, replies, fed)


class Own(FedAvg):
    """A method of one's own with another loss; it has not declared that the loss of a row depends on this row only."""

    def loss(self, *args: Any) -> Any:
        return 2 * super().loss(*args)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("central", {"options": {"aggregation": "weighted"}}, 'Set aggregation = "uniform"'),
        ("central", {"options": {"server": ServerOptimiser(aggregate="median")}}, "[server] aggregate = 'median'"),
        ("central", {"encoders": AWKWARD}, "BatchNorm"),
        ("example", {"encoders": AWKWARD}, "BatchNorm"),
        ("example", {"task": Classification(class_weights=(1.0, 2.0, 1.0, 1.0))}, "class_weights divide by"),
        ("example", {"options": {"train": Train(steps=5)}}, "[train] steps"),
        ("example", {"options": {"train": Train(accumulate=2)}}, "Set accumulate = 1"),
        ("central", {"delta": 0.2}, "must be below 1 / 6"),
        ("central", {"epsilon": 0.01}, "one round spends"),
        ("client-scaffold", {"unprotected": ()}, "ControlledUpdate.control (gradients of a, b, shared)"),
        ("central", {"options": {"selector": PowD(participation=2)}}, "statistic of shared"),
        (
            "central",
            {"amplification": True, "options": {"selector": PowD(participation=2)}},
            "Take the selector uniform",
        ),
        ("cmsfed", {"options": {"gradient_split": "delta"}}, 'Set gradient_split = "exact"'),
        ("cmsfed", {"options": {"client_weights": "clusters"}}, 'Set client_weights = "samples"'),
        ("cmsfed", {"amplification": True}, "the data decides which clients train which modalities"),
        ("cmsfed", {"unprotected": CMSFED}, "Report.gradient (gradients of a, b, shared)"),
        ("cmsfed-unselected", {"unprotected": ("statistic",)}, "Report.prototypes (prototypes of a, b)"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as error:
        assemble(private(kind, **changes))
    assert words in str(error.value)


class Reading(Uniform):
    """A selector that reads single replies and says nothing about it."""

    def learn(self, memory: Any, params: Any, replies: Any, fed: Any) -> Any:
        return {client: reply.params for client, reply in replies.items()}


class Admitting(Reading):
    """The same, which says so."""

    reads = ("params",)


class ReadingLosses(Uniform):
    """A selector that reads losses, which are withheld or accepted."""

    reads = ("loss",)

    def learn(self, memory: Any, params: Any, replies: Any, fed: Any) -> Any:
        return replies.numbers("loss")


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        (Reading(participation=4), "it overrides learn"),
        (Admitting(participation=4), "it reads params of single clients"),
    ],
)
def test_a_selector_must_not_read_protected_parameters(selector: Any, words: str) -> None:
    with pytest.raises(RecipeError) as error:
        assemble(private("central", options={"selector": selector}))
    assert words in str(error.value)


def test_a_selector_that_declares_what_it_reads_is_accepted() -> None:
    played(
        private("central", unprotected=("statistic",), options={"selector": ReadingLosses(participation=4)}, rounds=2)
    )


def test_a_method_that_sets_its_own_weights_has_to_declare_again() -> None:
    class Weighted(FedAvg):
        def weights(self, replies: Any, fed: Any) -> Any:
            return dict.fromkeys(replies, 2.0)

    assert not Weighted.honours("client")
    assert "overrides weights" in Weighted.dishonour("client")


@pytest.mark.parametrize("name", ["fedproto", "local", "splitfed", "fedgkt", "centralized"])
def test_methods_that_declare_nothing_are_refused(name: str) -> None:
    assert not ALGORITHMS[name].honours("client")
    with refuses(RecipeError, "privacy.unit: average") as error:
        assemble(recipe(algorithm(name), privacy=Privacy(**CLIENT)))  # type: ignore[arg-type]
    said = str(error.value)
    assert "its server does not only average the updates of the clients" in said
    assert "aggregation" not in said, "an option would not help"
    assert (
        'moon, pfedme, pfedmma, cmsfed with gradient_split = "exact" and unprotected = ["gradients", "prototypes",'
        in said
    )
    assert 'partialfl with unprotected = ["embeddings", "statistic"], scaffold with' in said
    assert "protects" not in said, "the user did not write the class"


def test_the_refusal_of_a_class_of_ones_own_says_what_to_declare() -> None:
    with refuses(RecipeError, "privacy.unit: Leaky"):
        assemble(recipe(Leaky(aggregation="uniform"), privacy=Privacy(**CLIENT)))  # type: ignore[arg-type]


def test_a_class_that_overrides_what_its_parent_declared_has_to_declare_again() -> None:
    assert Leaky.honours("client") == ()
    assert Leaky.honours("example") == ("update.params",)
    assert Own.honours("client") == ("update.params",)
    assert Own.honours("example") == ()
    assert "Leaky overrides merge" in Leaky.dishonour("client")


@pytest.mark.parametrize(
    ("name", "hook"), [("cmsfed", "learned"), ("cmsfed", "train_chosen"), ("partialfl", "server_train")]
)
def test_a_class_that_overrides_a_method_that_reads_replies_has_to_declare_again(name: str, hook: str) -> None:
    parent = ALGORITHMS[name]
    peeking = type("Peeking", (parent,), {hook: getattr(parent, hook)})
    assert peeking.honours("client") == ()
    assert f"Peeking overrides {hook}" in peeking.dishonour("client")
    again = type("Again", (peeking,), {"protects": parent.protects})
    assert again.honours("client") == parent.honours("client") != ()


def test_personal_evaluation_needs_to_be_accepted() -> None:
    made = private(options={"evaluation": Evaluation(every=1, personal=True)})
    made = replace(made, clients=replace(made.clients, personal_test=0.2))
    with refuses(RecipeError, "privacy.unprotected: OwnScore.sums"):
        assemble(made)
    run = polyfed.run(replace(made, privacy=replace(made.privacy, unprotected=("statistic",))))  # type: ignore[type-var]
    assert "personal" in run.result["metrics"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"unit": "client", "delta": 0.01}, "needs epsilon, noise_multiplier, or both"),
        ({"unit": "row", "delta": 0.01, "epsilon": 1.0}, "unit"),
        ({"unit": "client", "epsilon": 1.0}, "[privacy] needs delta: above 0 and below 1, such as 1e-3"),
        ({"unit": "client", "epsilon": -1.0}, "[privacy] needs delta"),
        ({"delta": 0.1, "epsilon": 1.0}, '[privacy] needs unit: "client" or "example"'),
        ({"unit": "client", "delta": 1.0, "epsilon": 1.0}, "above 0 and below 1"),
        ({"unit": "client", "delta": 0.1, "epsilon": 1.0, "unprotected": ["loss"]}, "no kind 'loss'"),
        ({"unit": "example", "delta": 0.1, "epsilon": 1.0, "amplification": True}, "amplification = true needs"),
    ],
)
def test_the_section_is_checked(table: dict[str, Any], words: str) -> None:
    whole = {"data": {"name": "toy"}, "algorithm": {"name": "fedavg"}, "privacy": table}
    with pytest.raises(RecipeError) as error:
        parse_recipe(whole)
    assert words in str(error.value)


def test_the_resolved_recipe_holds_the_noise_that_was_found(tmp_path: Path) -> None:
    made = private(epsilon=4.0, noise_multiplier=None)
    found = polyfed.run(made, tmp_path).result["privacy"]["noise_multiplier"]
    again = load_recipe(tmp_path / "recipe.toml").privacy
    assert again == Privacy(**CLIENT | {"epsilon": 4.0, "noise_multiplier": found})
    with refuses(RecipeError, "privacy.noise_multiplier"):  # the rounds so far had less noise
        polyfed.run(replace(made, rounds=5), tmp_path, resume=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("central", "Protects: whether one client's data was used at all. Counted as if every client took part in"),
        ("local", "Protects: which data one client used. Counted as if every client took part in every round"),
        ("example", "Protects: whether one row was used at all. Counted with each row in one batch of each epoch, and"),
    ],
)
def test_the_guarantee_is_said_in_plain_words(kind: str, words: str) -> None:
    promises = check(replace(private(kind), rounds=1)).promises
    assert words in " ".join(promises)
    assert "after 1 round (noise" in promises[0]


def test_the_page_rounds_epsilon_up_as_the_terminal_does(tmp_path: Path) -> None:
    run = polyfed.run(private(), out=tmp_path / "run")
    spent = epsilon_in_words(run.result["privacy"]["epsilon"])
    assert number_of(7.99811, "epsilon") == "7.999"
    assert f"Epsilon <b>{spent}</b>" in (tmp_path / "run" / "report.html").read_text()


def test_a_delta_above_the_inverse_of_all_rows_is_refused_and_says_whose_rows() -> None:
    with refuses(RecipeError, "privacy.delta: clients together"):
        assemble(private("example", delta=0.5))
