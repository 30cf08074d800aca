"""What an edge does with the packets of the federation's server: it enrols its devices, and runs parts with them.

The code of a part is the algorithm's (`federation/silos/parts.py`). Devices of the silo get the same requests as
from a server. Only replies to tasks of the scope `server` leave the edge, through its own policy. What the part returns
stays in the edge's store, under the place of the request, as a device's local state does: a part that is repeated
starts from the same state.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from polyfed.core.errors import BadReply, DataError, EgressError, PolyfedError, TooFewReplies
from polyfed.core.messages import Message, crossings
from polyfed.core.registry import only
from polyfed.core.system.files import PUBLIC_KEY, replace_text
from polyfed.core.system.json_and_toml import parse_json
from polyfed.core.tasks import path_of
from polyfed.core.tree import SHARED, Tree, digest
from polyfed.deploy.device.configuration import policy_on, recipe_on
from polyfed.deploy.device.memory.local_states import begin, check_fresh, keep, prune, state_before
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.deploy.device.runtime import LEDGER, book
from polyfed.deploy.edge.edge_file import EdgeConfig, refuse_demands
from polyfed.deploy.edge.signing import countersigned
from polyfed.deploy.faults import in_short, log, log_problem
from polyfed.deploy.handlers import MEGABYTE
from polyfed.deploy.server.claimed_shapes import without_absent
from polyfed.deploy.server.enrolment import Admission, enrolment_in
from polyfed.deploy.server.membership import Membership
from polyfed.deploy.server.server import reply_terms_of
from polyfed.engines.edges import DATA
from polyfed.engines.protocol import (
    ENROL,
    FAILED,
    PART,
    REFUSED,
    REPLY,
    SIGN,
    Enrolment,
    Facts,
    RequestId,
    SiloEnrolment,
    check_versions,
    reason,
    to_sign,
)
from polyfed.engines.queued import QueueTransport
from polyfed.engines.remote import Remote
from polyfed.experiment.checks.rank_checks import client_ranks
from polyfed.experiment.recipes.engine_choice import device_of
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.experiment.running.assembly import initial_of, model_of
from polyfed.experiment.running.checkpoint import pack, unpack
from polyfed.experiment.running.column_statistics import entry_of, parts_of, refuse_forbidden
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.warm_start import given_of
from polyfed.federation.client_registry import TEST
from polyfed.federation.federation import Federation
from polyfed.federation.message_validation import MessageValidator, Receiver
from polyfed.federation.silos.parts import InSilos, in_lockstep
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.audit_log.receipts import TO_SERVER
from polyfed.privacy.egress.contents import contents
from polyfed.privacy.egress.ledger import NO_RUN, TO_CLIENT, Entry, Ledger, lines
from polyfed.privacy.egress.policy import Policy
from polyfed.transport.queue import Queue
from polyfed.transport.tokens import Register

DEVICES = "devices.json"
"""The file in the edge's state folder with what its devices told when they enrolled, and with their keys."""

KNOWN = "federation.json"
"""The file in the edge's state folder with the recipe and the facts of the latest part, for predictions."""

PATIENCE = 0.8
"""The edge waits for its devices for this share of `enrol_seconds`, so that its answer reaches the server in time."""

SKELETON = "skeleton"


@dataclass(frozen=True)
class AtEdge:
    """A handler that answers the packets of the federation's server.

    Attributes:
        recipe_path: path of the recipe that came with the app.
        app: the app, which the devices of the silo get too.
    """

    recipe_path: Path
    app: bytes

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        """Answer a packet. Errors also become answers, which name no sample and no path."""
        edge: EdgeConfig = build("the file of an edge", EdgeConfig, config["edge"])
        who, request_id = f"the edge of silo {edge.silo}", None
        try:
            check_versions(packet.header, who)
            if (want := packet.header.get("want")) not in (ENROL, SIGN):
                request_id = RequestId.read(packet.header)
            with only(edge.node.rules.allowance):
                recipe = recipe_on(edge.node, self.recipe_path)
                if want == SIGN:
                    return self._countersigned(edge, recipe, packet)
                if request_id is None:
                    return self._enrol(edge, recipe, packet)
                return self._part(edge, recipe, packet, request_id)
        except EgressError as error:
            return self._refused(edge, reason(REFUSED, request_id, f"{who}: {error}"), request_id)
        except BadReply as error:
            return reason(FAILED, request_id, f"{who}: the message {error}")
        except TooFewReplies as error:
            return reason(FAILED, request_id, f"{who}: {error}")
        except Unfit:
            why = (
                "the sample ids of its devices do not fit each other, or they share none; the log of the edge says more"
            )
            result = reason(FAILED, request_id, f"{who}: {why}")
            return Packet(result.header | {"fault": DATA})
        except (PolyfedError, OSError) as error:
            log_problem(f"{who}: {error}")
            return reason(FAILED, request_id, f"{who}: {in_short(error)}")

    def _refused(self, edge: EdgeConfig, reply: Packet, request: RequestId | None) -> Packet:
        """Write a refusal to the edge's audit log, and return it; a failure if the log cannot be written."""
        place = {} if request is None else {"run": request.run, "round": request.round}
        try:
            AuditLog(edge.node.folder).note([{"event": "refused", **place, "why": reply.header["reason"]}])
        except (PolyfedError, OSError) as error:
            log_problem(f"the edge of silo {edge.silo}: {reply.header['reason']}; {error}")
            return reason(FAILED, request, f"the edge of silo {edge.silo}: its audit log cannot be written")
        return reply

    def _enrol(self, edge: EdgeConfig, recipe: Recipe, packet: Packet) -> Packet:
        """Enrol the devices of the silo, and return what they tell.

        Raises:
            EgressError: the policy of a device or of the edge refuses.
            TooFewReplies: not all devices enrolled.
        """
        if recipe.deployment.relay != "edge":
            raise EgressError("it works only for a recipe with [deployment] relay = 'edge'")
        if AuditLog(edge.node.folder).prepare():
            log(f"made the key of the audit log; keep a copy of {edge.node.folder / PUBLIC_KEY} elsewhere")
        rounds, run = packet.header.get("rounds_left", 1), packet.header.get("run", "")
        told: dict[str, Any] = {"rounds_left": rounds, "run": run}
        with devices_of(edge, recipe, self.app, **told) as (transport, _):
            known = met(transport, edge, PATIENCE * recipe.deployment.enrol_seconds)
            nodes = {str(client): str(node) for client, node in transport.node_of.items()}
        policy = _policy(edge, recipe, known)
        if not policy.allows("statistic", SHARED, "server"):
            fix = policy.fix(("statistic",), SHARED, "server")
            raise EgressError(f"it refused to tell how many rows its devices have. It would if its policy said: {fix}")
        for one in known:
            refuse_forbidden(one.columns, policy, one.client)
        header = SiloEnrolment(edge.silo, tuple(known)).header()
        SiloEnrolment.read(header)  # a device of another silo
        _book_columns(edge.node.folder, known)
        replace_text(edge.node.folder / DEVICES, json.dumps({"devices": header["devices"], "nodes": nodes}))
        return Packet(header)

    def _countersigned(self, edge: EdgeConfig, recipe: Recipe, packet: Packet) -> Packet:
        """Sign the ledger of a run; see `polyfed.deploy.edge.signing`."""
        run, _, _ = to_sign(packet.header)
        _, nodes = _known(edge)
        with devices_of(edge, recipe, self.app, run=run) as (transport, _):
            transport.node_of.update(nodes)
            return countersigned(edge, recipe, packet, transport)

    def _part(self, edge: EdgeConfig, recipe: Recipe, packet: Packet, request_id: RequestId) -> Packet:
        """Run a part with the devices of the silo."""
        if (packet.header.get("want"), request_id.client) != (PART, edge.silo):
            raise BadReply(f"is no part of silo {edge.silo}")
        known, nodes = _known(edge)
        _remember(edge.node.folder, self.recipe_path, packet)
        with (
            DeviceStore(edge.node.folder).alone(request_id.run, edge.silo) as store,
            devices_of(edge, recipe, self.app, run=request_id.run) as (transport, session),
        ):
            assert store is not None, "the lock was waited for"
            with store.transaction() as memory:
                check_fresh(memory, request_id)
                found = state_before(memory, request_id)
                begin(memory, request_id)
            prune(store.store, request_id.run, edge.silo)
            silo = AtWork.of(edge, recipe, self.recipe_path.parent, packet, request_id, known, transport, session)
            transport.node_of.update(nodes)
            sent = False
            try:
                made, kept = silo.run(packet, None if found is None else _unpacked(found[0], recipe))
                answer = silo.forwarded(made)
                left = {(one.number, client) for one in made.answers for client in one.replies}
                with store.transaction() as memory:
                    keep(memory, request_id, _packed(kept), (), int(packet.header.get("kept", 0)))
                    sent = True
                    seal = silo.book(store.folder, left)
            finally:
                if not sent:
                    silo.book(store.folder, set())
            return Packet(answer.header | {"seal": seal}, answer.body)


@contextmanager
def devices_of(edge: EdgeConfig, recipe: Recipe, app: bytes, **told: Any) -> Iterator[tuple[QueueTransport, int]]:
    """Yield the transport to the devices of a silo, and the number of a new session.

    Args:
        app: what the devices get besides requests.
        told: further attributes of the transport.
    """
    folder = edge.node.folder
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    register = Register(Path(edge.credentials))
    members = Membership(folder, register.numbers, register.replaced)

    def vet(packet: Packet, device: str) -> str:
        if packet.header.get("silo") != edge.silo:
            said = packet.header.get("silo")
            return f"the device says that it is of silo {said}, and this is the edge of silo {edge.silo}"
        return members.refusal(packet, device)

    limit = recipe.deployment.message_megabytes * MEGABYTE
    queue = Queue(Path(edge.credentials) / "queue")
    told |= {"renewed": register.replaced, "registered": register.keys}
    transport = QueueTransport(queue=queue, app=app, vet=vet, limit=limit, noted=AuditLog(folder).note, **told)
    try:
        yield transport, members.session
    finally:
        transport.end()


@dataclass(frozen=True)
class AtWork:
    """A part at work: the silo's devices as a federation of their own."""

    edge: EdgeConfig
    recipe: Recipe
    fed: Federation
    engine: Remote
    policy: Policy
    request_id: RequestId

    @classmethod
    def of(
        cls,
        edge: EdgeConfig,
        recipe: Recipe,
        app: Path,
        packet: Packet,
        request_id: RequestId,
        known: Sequence[Enrolment],
        transport: QueueTransport,
        session: int,
    ) -> "AtWork":
        """Build the model as the server and the devices do.

        Raises:
            BadReply: the packet cannot be read, or the server has another model.
        """
        facts = Facts.read(packet.header)
        seed, rounds, kept = (packet.header.get(name) for name in ("seed", "rounds", "kept"))
        if not all(type(number) is int and number >= 0 for number in (seed, rounds, kept)):
            raise BadReply("is not a part that can be read")
        assert isinstance(seed, int)
        assert isinstance(rounds, int)
        assert isinstance(kept, int)
        recipe = without_absent(recipe, facts.shapes)
        if not request_id.round <= rounds <= recipe.rounds:
            raise BadReply(f"is for round {request_id.round} of {rounds}, but the recipe has {recipe.rounds}")
        told = Policy.parse(recipe.egress, facts.shapes, guards=recipe.egress)
        given = given_of(recipe, app)
        model = model_of(recipe, facts.shapes, facts.num_classes, told, given)
        if facts.frozen != digest(model.unsent):
            raise BadReply("is for a model whose frozen parameters differ from those of the edge")
        ordered = sorted(known, key=lambda one: one.client)
        admission = Admission(ordered, {}, facts.shapes, facts.num_classes, None, recipe, order=tuple(facts.shapes))
        engine = Remote(
            *(admission.population(Emitter([])), model, recipe.algorithm, initial_of(recipe, model, given)),
            policy=told,
            ledger=Ledger(request_id.run, hashing=True),
            device=device_of(recipe),
            emit=Emitter([_log_missing]),
            objective=task_of(recipe),
            transport=transport,
            facts=facts,
            terms=replace(reply_terms_of(recipe, session), min_replies=0),
        )
        engine.saved(kept)
        fed = Federation(
            clients=engine.registry,
            engine=engine,
            owner=recipe.algorithm,
            context=engine.context(TEST),
            template=engine.initial,
            seed=seed,
            rounds=rounds,
            min_replies=0,  # the server has the quorum
            outlier_factor=recipe.engine.outlier_factor,
            emit=engine.emit,
            ranks=client_ranks(recipe, model, None),
            round=request_id.round,
            asked=request_id.request,
        )
        return cls(edge, recipe, fed, engine, _policy(edge, recipe, known), request_id)

    def run(self, packet: Packet, kept: Any) -> tuple[InSilos, Any]:
        """Run the part. Return its requests, and what the edge keeps.

        Raises:
            BadReply: the algorithm has no such part, or the message is not as it declares.
            TooFewReplies: the silo cannot take part.
        """
        method, name, silo = self.recipe.algorithm, packet.header.get("part"), self.edge.silo
        if name not in method.silo_parts:
            raise BadReply(f"asks for the part '{str(name)[:80]}', which {type(method).__name__} lacks")
        part = getattr(method, str(name))
        kind = get_type_hints(part)["got"]
        got: Message = decode(packet, kind, limit=self.engine.terms.limit)
        owned = tuple(m for m in self.fed.clients.modalities if any(m in self._owned(c) for c in self._members))
        model = self.engine.model
        validator = MessageValidator(self.engine.initial, model, tuple(model.shapes), self.engine.objective)
        validator.check_received(got, kind, Receiver(owned, 0, may_lack=True))
        blocks = crossings(got)
        entry = Entry(
            *self.request_id.place,
            (min(self._members),),
            kind.__name__,
            blocks,
            TO_CLIENT,
            (True,) * len(blocks),
            contents(got, blocks, (True,) * len(blocks)),
        )
        self.engine.ledger.book(entry)
        try:
            running = {silo: part(silo, self._members, kept, self.engine.to_device(got), self.fed)}
            result = in_lockstep(self.fed, running)
        except DataError as error:
            log_problem(f"the edge of silo {silo}: {error}")
            raise Unfit from error
        if silo in result.missing:
            raise TooFewReplies(result.missing[silo])
        return result, result.kept[silo]

    @property
    def _members(self) -> list[int]:
        result: list[int] = self.recipe.algorithm.devices(self.fed).get(self.edge.silo, [])  # type: ignore[attr-defined]
        return result

    def _owned(self, client: int) -> tuple[str, ...]:
        return self.fed.clients.owned(client)

    def forwarded(self, made: InSilos) -> Packet:
        """Return the answer to the server.

        Raises:
            EgressError: the edge's policy forbids a part of it.
        """
        asked, bodies = [], list[bytes]()
        for answer in made.answers:
            replies = {}
            for client, reply in answer.replies.items():
                self._refuse(client, reply)
                one = encode(reply)
                replies[str(client)] = one.header | {"size": len(one.body)}
                bodies.append(bytes(one.body))
            missing = {str(client): why for client, why in answer.replies.missing.items()}
            task = path_of(answer.task, self.recipe.algorithm)
            place = {"task": task, "number": answer.number, "turn": answer.turn}
            asked.append(place | {"replies": replies, "missing": missing})
        header = self.request_id.header(verdict=REPLY, last=self.fed.asked, asked=asked)
        return Packet(header, b"".join(bodies))

    def _refuse(self, client: int, reply: Message) -> None:
        for part in crossings(reply):
            if not self.policy.allows(part.kind, part.block, "server"):
                fix = self.policy.fix((part.kind,), part.block, "server")
                raise EgressError(
                    f"its policy keeps {type(reply).__name__}.{part.field} of client {client} ({part.kind} of "
                    f"{part.block}) from the server. It would leave if the edge's policy said: {fix}"
                )

    def book(self, folder: Path, left: Collection[tuple[int, int]]) -> str:
        """Write what passed the edge to its ledger and audit log. Return the hash of the seal.

        Args:
            folder: the edge's folder of this run.
            left: request and client of each reply that leaves for the server. Others for the server, such as one that
                is not as its task declares, end at the edge.
        """
        entries: list[Entry] = [
            one
            for one in self.engine.ledger.drain()
            if one.destination != TO_SERVER or all((one.request, client) in left for client in one.clients)
        ]
        book(folder / LEDGER, lines(entries, self.request_id.run))
        return AuditLog(self.edge.node.folder).append(entries, self.request_id.run)


def _policy(edge: EdgeConfig, recipe: Recipe, known: Sequence[Enrolment]) -> Policy:
    """Return what may leave the silo.

    Raises:
        RecipeError: the policy file is wrong, or has a section that only a device can obey.
    """
    refuse_demands(edge)
    held = tuple(dict.fromkeys(name for one in known for name in one.modalities))
    return policy_on(replace(edge.node, modalities=",".join(held)), recipe, held)


def met(transport: QueueTransport, edge: EdgeConfig, seconds: float) -> list[Enrolment]:
    """Wait for the devices of the silo.

    Raises:
        EgressError: a device refused.
        TooFewReplies: not all of them enrolled.
    """

    def heard(answers: Sequence[Packet]) -> bool:
        return any(answer.header.get("verdict") == REFUSED for answer in answers)

    known: list[Enrolment] = []
    absent: list[str] = []
    for answer in transport.enrol(edge.devices, seconds, heard):
        try:
            known.append(enrolment_in(answer))
        except BadReply as error:
            absent.append(str(error))
    if len(known) < edge.devices:
        why = "; ".join(absent) or "no other device answered"
        raise TooFewReplies(f"{len(known)} of its {edge.devices} devices enrolled ({why})")
    return known


def _book_columns(folder: Path, known: Sequence[Enrolment]) -> None:
    """Write what devices tell about their columns to the edge's audit log, before it leaves, as each device does."""
    told = {one.client: parts_of(one.columns) for one in known if one.columns}
    entries = [entry_of((client,), parts, hashes) for client, (parts, hashes) in told.items()]
    AuditLog(folder).append(entries, NO_RUN)


def _known(edge: EdgeConfig) -> tuple[list[Enrolment], dict[int, str]]:
    """Return what the devices told when they enrolled, and the key of each.

    Raises:
        BadReply: they have not enrolled.
    """
    try:
        result = parse_json((edge.node.folder / DEVICES).read_text())
    except (OSError, ValueError):
        raise BadReply("came before the silo had enrolled; start the run again") from None
    nodes = {int(client): node for client, node in result["nodes"].items()}
    return [Enrolment.read(one) for one in result["devices"]], nodes


def _remember(folder: Path, recipe_path: Path, packet: Packet) -> None:
    """Keep the recipe and the facts of the federation, which the edge needs to predict after the run."""
    Facts.read(packet.header)
    text = json.dumps({"recipe": recipe_path.read_text(encoding="utf-8"), "facts": packet.header["facts"]})
    path = folder / KNOWN
    if not path.exists() or path.read_text() != text:
        replace_text(path, text)


def _packed(kept: Any) -> Tree:
    """Return what an edge keeps as one tree, for its store."""
    tensors: dict[str, Tensor] = {}
    skeleton = json.dumps(pack(kept, tensors)).encode()
    return tensors | {SKELETON: torch.frombuffer(bytearray(skeleton), dtype=torch.uint8)}


def _unpacked(tree: Tree, recipe: Recipe) -> Any:
    """Return what an edge has kept."""
    skeleton = bytes(tree[SKELETON].tolist())
    tensors = {name: value.to(device_of(recipe)) for name, value in tree.items() if name != SKELETON}
    return unpack(parse_json(skeleton.decode()), tensors, ())


def _log_missing(event: str, **facts: Any) -> None:
    if event == "client-missing":
        log_problem(f"client {facts['client']}, task {facts['task']}: {facts['reason']}")


class Unfit(Exception):
    """The devices of the silo do not fit each other. The edge's log says how; the server does not learn it."""
