"""Handlers: they answer packets for all clients of a simulation, or for the client of one device."""

import hashlib
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyfed.algorithms import NAMED
from polyfed.algorithms.evaluate import Evaluate
from polyfed.core.errors import BadReply, EgressError, NotAllowed, PolyfedError, counted
from polyfed.core.registry import name_of, only
from polyfed.core.system.files import PUBLIC_KEY
from polyfed.core.system.mapping import on_disk
from polyfed.core.tree import clone
from polyfed.data import Population
from polyfed.deploy.device.configuration import (
    WHERE,
    NodeConfig,
    check_held,
    policy_on,
    recipe_on,
)
from polyfed.deploy.device.data import population_on
from polyfed.deploy.device.enrolment import enrolment, enrolment_refusal
from polyfed.deploy.device.memory.local_states import end
from polyfed.deploy.device.memory.privacy_budget import refuse_spent
from polyfed.deploy.device.memory.repeated_requests import conditions_of, unpaid_rounds
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.deploy.device.runtime import ClientRuntime
from polyfed.deploy.faults import Fault, blamed, log, log_event, log_fault, log_problem
from polyfed.deploy.server.claimed_shapes import without_absent
from polyfed.engines import Sequential
from polyfed.engines.protocol import (
    ENROL,
    ENROLLED,
    FAILED,
    REFUSED,
    SIGN,
    SIGNED,
    Facts,
    RequestId,
    check_versions,
    reason,
    to_sign,
)
from polyfed.experiment.checks.limit_checks import unfit_options
from polyfed.experiment.checks.protection import mechanism_of
from polyfed.experiment.checks.rank_checks import client_ranks
from polyfed.experiment.checks.requirement_checks import release_of, scores_of, unmet, unmet_by_model
from polyfed.experiment.recipes.engine_choice import device_of
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import task_of, with_task
from polyfed.experiment.running.assembly import initial_of, model_of, population_of
from polyfed.experiment.running.column_statistics import entry_of, parts_of
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.warm_start import given_of
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.audit_log.receipts import receipt
from polyfed.privacy.egress.ledger import NO_RUN, Ledger
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.privacy.egress.policy import Policy
from polyfed.privacy.egress.purposes import Terms
from polyfed.privacy.egress.requirements import NO_REQUIREMENTS, Requirements

MEGABYTE = 2**20

_RUNTIMES: dict[str, ClientRuntime] = {}
"""Runtimes of this process, by token. Ray copies a handler for every call, but this table keeps the loaded data."""


@dataclass(frozen=True)
class Simulated:
    """A handler that answers for every client of a recipe.

    Each process that holds a copy of this handler loads and partitions the data.

    Attributes:
        recipe: the recipe. Its [egress] section is the policy of every client.
        folder: folder of the clients' local states and ledgers.
        token: identifies this simulation within the process.
    """

    recipe: Recipe
    folder: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        """Answer a packet for the client with the number `partition-id`."""
        client = int(config["partition-id"])
        runtime = self.runtime()
        if packet.header.get("want") == ENROL:
            owned = runtime.engine.registry.owned(client)
            return enrolment(runtime.engine.population, runtime.engine.policy.for_client(owned), client)
        return runtime.answer(packet, client)

    def runtime(self) -> ClientRuntime:
        """Return the runtime of this process. The first call makes the runtime."""
        if self.token not in _RUNTIMES:
            torch.set_num_threads(1)  # each client has one CPU, so more threads per process would slow each other down
            population = population_of(self.recipe)
            recipe = with_task(self.recipe, population.columns, population.train.rows)
            policy = Policy.parse(recipe.egress, population.columns.modalities, guards=recipe.egress)
            shapes = {name: column.shape for name, column in population.columns.modalities.items()}
            facts = Facts(shapes, population.columns.num_classes)
            _RUNTIMES[self.token] = runtime_of(recipe, population, facts, policy, self.folder)
        return _RUNTIMES[self.token]


@dataclass(frozen=True)
class Deployed:
    """A handler that answers for the client of one device. The node's configuration names the device's data and policy.

    Attributes:
        recipe_path: path of the recipe that came with the app.
    """

    recipe_path: Path

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        """Answer a packet. Errors on this device also become answers.

        This device's log holds all details of an error. The answer to the server names the client and the type of the
        error, but no path and no name of this device.
        """
        number = config.get("client")
        who = f"client {number}" if type(number) is int else "a client without a number"
        try:
            reply = self._answer(packet, config)
        except BadReply as error:
            reply = reason(FAILED, _request_id(packet), f"the message {error}")
        except NotAllowed as error:
            reply = reason(REFUSED, _request_id(packet), f"{who} refused the recipe: {error}")
        except EgressError as error:
            reply = reason(REFUSED, _request_id(packet), str(error))
        except Fault as fault:
            log_fault(who, fault, _folder_in(config))
            return reason(FAILED, _request_id(packet), f"{who}: {fault}; its own log says why")
        if reply.header.get("verdict") in (REFUSED, FAILED):
            log_problem(str(reply.header["reason"]))
        if reply.header.get("verdict") == REFUSED:
            try:
                self._book_refusal(reply, config)
            except Fault as fault:
                log_fault(who, fault, _folder_in(config))
                return reason(FAILED, _request_id(packet), f"{who}: {fault}; its own log says why")
        return reply

    def _book_refusal(self, reply: Packet, config: Mapping[str, Any]) -> None:
        """Write a refusal to the device's audit log, before the server hears of it.

        Raises:
            Fault: the log cannot be written.
        """
        with blamed("its audit log cannot be written"):
            node: NodeConfig = build(WHERE, NodeConfig, config)
            _book(node, "refused", str(reply.header["reason"]), self._recipe(), _request_id(reply))

    def _recipe(self) -> str:
        """The SHA-256 of the recipe that came with the request."""
        return hashlib.sha256(self.recipe_path.read_bytes()).hexdigest()

    def _answer(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        with blamed(f"its table {WHERE} is not valid"):
            node: NodeConfig = build(WHERE, NodeConfig, config)
        with blamed("its policy file is not valid"):
            allowance = node.rules.allowance
        if packet.header.get("want") == SIGN:
            return _countersigned(packet, node)
        with only(allowance):
            return self._work(packet, node)

    def _work(self, packet: Packet, node: NodeConfig) -> Packet:
        """Answer a packet. The recipe came from the server, so only code that the device's owner allows may run."""
        check_versions(packet.header, "this device")  # first, because another version may write other recipes
        enrols = packet.header.get("want") == ENROL
        with blamed("its files cannot be read"):  # before the files are read, see `conditions_of`
            conditions = "" if enrols else conditions_of(self.recipe_path, node)
        with blamed("the recipe cannot be read there"):
            recipe = recipe_on(node, self.recipe_path)
        with blamed("its policy file is not valid"):
            policy, limits = policy_on(node, recipe, node.held), node.rules.limits.stricter(recipe.limits)
            required = node.rules.required
        terms = _terms_of(recipe, node, enrols=enrols)
        with blamed("its limits cannot be compared with the recipe"):
            _refuse_unmet(unfit_options(limits, recipe), node.client)
        with blamed("its requirements cannot be compared with the recipe"):
            _refuse_unmet(unmet(required, recipe, shared=node.silo >= 0), node.client)
            if enrols:
                release = release_of(required, recipe)
                rounds = unpaid_rounds(packet.header, recipe.rounds, release, node.folder, node.client)
                scores = scores_of(required, recipe, rounds)
                refuse_spent(required, release, node.folder, node.client, rounds, scores)
        facts = None if enrols else Facts.read(packet.header)

        def vet(rows: int) -> None:
            if why := enrolment_refusal(rows, policy, node.client, limits):
                raise EgressError(why)

        with blamed("its data cannot be used"):
            check_held(node, recipe)
            population = population_on(node, recipe, facts, vet, limits.value("min_rows_per_class") or 0)
        if facts is None:
            answer = enrolment(population, policy, node.client, limits, task_of(recipe), evaluated=terms.evaluation)
            with blamed("its audit log cannot be written"):
                if answer.header.get("verdict") == ENROLLED:
                    _book_told(node, population)
                    _book(node, "enrolled", _what_for(recipe), self._recipe())
            return answer
        with blamed("it cannot build the model"):
            runtime = runtime_of(
                recipe,
                population,
                facts,
                policy,
                node.folder,
                relay=node.relays(recipe),
                limits=limits,
                required=required,
                conditions=conditions,
                app=self.recipe_path.parent,
            )
            runtime = replace(
                runtime,
                purpose=recipe.deployment.purpose,
                terms=terms,
                checkpoint_seconds=node.checkpoint_seconds,
            )
            _refuse_unmet(unmet_by_model(required, recipe, runtime.engine.model, runtime.engine.initial), node.client)
        with blamed("a task failed"):
            return runtime.answer(packet, node.client)


def _countersigned(packet: Packet, node: NodeConfig) -> Packet:
    """Sign the device's ledger of a run; see `polyfed.privacy.egress.audit_log.receipts`."""
    check_versions(packet.header, "this device")
    run, client, unanswered = to_sign(packet.header)
    if client != node.client:
        raise BadReply(f"is for client {client}, this is client {node.client}")
    policy = policy_digest(node)
    with blamed("its audit log cannot be signed"):
        result = receipt(AuditLog(node.folder), run, client, unanswered, policy, behind_edge=node.silo >= 0)
    with blamed("its store cannot be written"):
        end(DeviceStore(node.folder), run, client)
    return Packet({"verdict": SIGNED, **result})


def policy_digest(node: NodeConfig) -> str:
    """Return the SHA-256 of the policy file of a device or an edge, or "" for the default policy."""
    return hashlib.sha256(node.rules.text).hexdigest() if node.rules.path else ""


def _book_told(node: NodeConfig, population: Population) -> None:
    """Write what an enrolment tells about columns to the device's audit log, before it leaves.

    The device does not know the name of the run yet, so these rows have none.
    """
    if population.told and population.told[node.client]:
        parts, hashes = parts_of(population.told[node.client])
        _audit_of(node).append([entry_of((node.client,), parts, hashes)], NO_RUN)


def _audit_of(node: NodeConfig) -> AuditLog:
    """Return the audit log of a device, whose key is made if there is none."""
    result = AuditLog(node.folder)
    if result.prepare():
        log(f"made the key of the audit log; keep a copy of {node.folder / PUBLIC_KEY} elsewhere")
    return result


def _book(node: NodeConfig, event: str, why: str, recipe: str, request: RequestId | None = None) -> None:
    """Write an enrolment or a refusal to the device's audit log."""
    place: dict[str, Any] = {"run": NO_RUN}
    if request is not None:
        place = {"run": request.run, "round": request.round, "ask": request.request}
    told = {"event": event, **place, "client": node.client, "recipe": recipe, "why": why}
    _audit_of(node).note([told])


def _what_for(recipe: Recipe) -> str:
    """Return in what a device has enrolled, in a sentence."""
    purpose = f" for {recipe.deployment.purpose}" if recipe.deployment.purpose else ""
    return f"{name_of(recipe.algorithm, NAMED)} over {counted(recipe.rounds, 'round', 'rounds')}{purpose}"


def _folder_in(config: Mapping[str, Any]) -> Path | None:
    """Return the state folder of a device, or None if its configuration is not valid."""
    try:
        node: NodeConfig = build(WHERE, NodeConfig, config)
    except PolyfedError:
        return None
    return node.folder


def _terms_of(recipe: Recipe, node: NodeConfig, *, enrols: bool) -> Terms:
    """Return what the device allows now for the purpose of a recipe.

    Raises:
        EgressError: the device does not take part for this purpose, or does not enrol in a run of this kind.
    """
    purpose, purposes = recipe.deployment.purpose, node.rules.purposes
    evaluates = isinstance(recipe.algorithm, Evaluate) if enrols else None
    why = purposes.refusal(purpose, datetime.now(UTC), evaluates)
    _refuse_unmet([why] if why else [], node.client)
    terms = purposes.terms(purpose)
    assert terms is not None, "it was refused"
    return terms


def _refuse_unmet(reasons: Iterable[str], client: int) -> None:
    """Refuse a recipe that lacks a protection that the device demands.

    Raises:
        EgressError: there are reasons to refuse the recipe. The message lists all of them.
    """
    if found := "; ".join(reasons):
        raise EgressError(f"client {client} refused the recipe: {found}")


def _request_id(packet: Packet) -> RequestId | None:
    """Return the request id of a packet, or None if the packet has no valid id."""
    try:
        return RequestId.read(packet.header)
    except BadReply:
        return None


def runtime_of(
    recipe: Recipe,
    population: Population,
    facts: Facts,
    policy: Policy,
    folder: Path,
    *,
    relay: bool | None = None,
    limits: Limits = NO_LIMITS,
    required: Requirements = NO_REQUIREMENTS,
    conditions: str = "",
    app: Path | None = None,
) -> ClientRuntime:
    """Build the runtime of one device, or of all clients of a simulation.

    Args:
        population: the clients and their rows.
        facts: the server's facts about the federation.
        policy: the policy of these clients.
        folder: folder of local states and ledgers.
        relay: whether this device allows messages within its silo to pass through the server. If None, as in a
            simulation, the recipe's setting applies.
        limits: the limits that a device sets.
        required: the protection that a device demands.
        conditions: see `ClientRuntime`.
        app: the folder of the recipe's app, which may hold the values of a warm start.
    """
    recipe = without_absent(recipe, facts.shapes)
    told = Policy.parse(
        recipe.egress, facts.shapes, guards=recipe.egress
    )  # the model must be the same as the server's model
    given = given_of(recipe, app)
    model = model_of(recipe, facts.shapes, facts.num_classes, told, given)
    own, initial = relay is not None, initial_of(recipe, model, given)
    mechanism = None if recipe.privacy is None else mechanism_of(recipe, model, initial, None, secure=own)
    terms: dict[str, Any] = {"limits": limits, "required": required, "on_device": own}
    engine = Sequential(
        *(population, model, recipe.algorithm, initial),
        policy=policy,
        ledger=Ledger("none"),
        device=device_of(recipe),
        emit=Emitter([log_event] if own else []),
        objective=task_of(recipe),
        privacy=mechanism,
        wire=recipe.wire,
        copied=partial(on_disk, folder=folder) if own else clone,
        **terms,
    )
    return ClientRuntime(
        engine,
        folder,
        relay if relay is not None else recipe.deployment.relay == "server-sees",
        recipe.deployment.message_megabytes * MEGABYTE,
        discreet=own,
        audit=AuditLog(folder) if own else None,
        release=release_of(required, recipe),
        conditions=conditions,
        rounds=recipe.rounds,
        ranks=client_ranks(recipe, model, None),
    )
