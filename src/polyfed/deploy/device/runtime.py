"""A client's runtime: it reads a request, runs the task, and passes the reply through the egress gate.

It also stores the client's local state and ledger.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from polyfed.core.errors import BadReply, EgressError, PolyfedError
from polyfed.core.messages import Message, cut
from polyfed.core.request import HELD_OUT, Request
from polyfed.core.system.files import append_whole, undone
from polyfed.core.tasks import tasks_of
from polyfed.core.tree import Tree, digest
from polyfed.deploy.device.memory.local_states import begin, check_fresh, keep, places_of, prune, state_before
from polyfed.deploy.device.memory.privacy_budget import admit_release, admit_state, spend
from polyfed.deploy.device.memory.repeated_requests import (
    admit_secrets,
    bind_secrets,
    digest_of_use,
    forget_replies,
    keep_reply,
    kept_reply,
)
from polyfed.deploy.device.memory.request_limits import admit, admit_purpose, admit_today
from polyfed.deploy.device.memory.store import ClientStore, DeviceStore, Memory
from polyfed.deploy.device.memory.trainings import KeptProgress, forget_trainings
from polyfed.deploy.faults import Fault, in_short, log_problem
from polyfed.engines import Sequential
from polyfed.engines.base import first_local
from polyfed.engines.machine.gpu import deterministic
from polyfed.engines.protocol import FAILED, LARGEST_NUMBER, REFUSED, REPLY, Facts, RequestId, check_versions, reason
from polyfed.evaluation.conformal import subsets_in
from polyfed.federation.client_ranks import ClientRanks
from polyfed.federation.message_validation import MessageValidator, Receiver
from polyfed.federation.wire.compression import Rounded
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.ledger import TO_CLIENT, Entry, Ledger, lines
from polyfed.privacy.egress.purposes import ANY, Terms, header
from polyfed.privacy.egress.requirements import Release

LEDGER = "egress.jsonl"
"""File name of a client's own ledger, in the folder of its local state."""


@dataclass
class ClientRuntime:
    """Runs the tasks of one client, or of the simulated clients of one process.

    Attributes:
        engine: holds the clients' data and policy.
        folder: folder of local states and ledgers. It has a subfolder for every run. The subfolder of a run has a
            subfolder for each client.
        relay: whether replies to the client's silo may pass through the server.
        limit: size in bytes of the largest message that the client reads.
        discreet: whether to raise errors of this client as a `Fault`, so that the server learns only their type.
        audit: the device's audit log, or None in a simulation.
        release: the privacy cost of one reply with noise, or None if the device does not limit epsilon.
        conditions: digest of the recipe, policy and data of a device; see `repeated_requests.conditions_of`.
        rounds: number of rounds of the recipe, or None if it is not known. No request may be of a later round.
        ranks: the LoRA ranks of the clients.
        purpose: the purpose that the recipe names, or None in a simulation.
        terms: what the device allows for this purpose.
        checkpoint_seconds: see `NodeConfig`; 0 in a simulation.
    """

    engine: Sequential
    folder: Path
    relay: bool = False
    limit: int = 2**29
    discreet: bool = False
    audit: AuditLog | None = None
    release: Release | None = None
    conditions: str = ""
    rounds: int | None = None
    ranks: ClientRanks = ClientRanks()
    purpose: str | None = None
    terms: Terms = ANY
    checkpoint_seconds: float = 0.0

    def answer(self, packet: Packet, client: int) -> Packet:
        """Answer a request. Errors also become answers, so that no request can stop the client.

        Raises:
            Fault: an error occurred and the client is `discreet`.
        """
        request_id = None
        try:
            request_id = RequestId.read(packet.header)
            if request_id.client != client:
                raise BadReply(f"is for client {request_id.client}, this is client {client}")
            with deterministic(self.engine.device):
                return self._work(packet, request_id)
        except EgressError as error:
            for note in getattr(error, "__notes__", ()):  # numbers that the server does not get
                log_problem(note)
            return reason(REFUSED, request_id, str(error))
        except BadReply as error:
            return reason(FAILED, request_id, f"the message {error}")
        except (PolyfedError, OSError) as error:
            if self.discreet:
                raise Fault(in_short(error)) from error
            return reason(FAILED, request_id, f"{type(error).__name__}: {error}")

    def _work(self, packet: Packet, request_id: RequestId) -> Packet:
        check_versions(packet.header, f"client {request_id.client}")
        request = self._ask(packet, request_id)
        self._check_frozen(packet, request_id.client)
        self._check_held(packet, request_id.client)
        got = self._received(packet, request, request_id.client)
        self._refuse_made_model(request, got, request_id.client)
        device = DeviceStore(self.folder)
        with device.alone(request_id.run, request_id.client) as store:
            assert store is not None, "the lock was waited for"
            return self._answer_alone(store, packet, request_id, request, got)

    def _answer_alone(
        self, store: ClientStore, packet: Packet, request_id: RequestId, request: Request, got: Message
    ) -> Packet:
        """Answer a request while no other process works on this client and run.

        One transaction admits the request before the task, and another one keeps what the task leaves. A crash between
        them has counted a reply that did not leave, and never the other way round.
        """
        local, use, known, progress = self._admit(store, packet, request_id, request)
        prune(store.store, request_id.run, request_id.client)
        ledger = Ledger(request_id.run, hashing=self.audit is not None)
        before = {} if local is None else {request_id.client: local}
        evaluates = self._evaluations(store.store, request_id)
        engine = self.engine.for_request(ledger, before, evaluates, self._trainings(request_id.client), progress)
        missing: dict[int, str] = {}
        content: Packet | None = None
        booked, seal = False, ""
        try:
            if known is not None:
                content = self._released_again(engine, request, request_id.client, got, known)
            elif (reply := engine.alone(request, request_id.client, got, missing)) is not None:
                content = encode(reply, engine.packed)
            if content is not None:
                with store.transaction() as memory:
                    if known is None:
                        left, kept = engine.locals.get(request_id.client, {}), int(packet.header.get("kept", 0))
                        self._keep(memory, request_id, request, local, left, kept)
                        if self._adds_noise(request):
                            keep_reply(memory, request_id, use, content, kept)
                    booked = True  # last, because what the log says cannot be undone
                    seal = self._book(store, request_id, ledger.drain(), sent=True)
        finally:
            if not booked:
                self._book(store, request_id, ledger.drain(), sent=False)
        if content is None and self.discreet:
            raise Fault(f"{missing[request_id.client].partition(':')[0]} in task {request.name}")
        if content is None:
            return reason(FAILED, request_id, missing[request_id.client])
        return Packet(request_id.header(verdict=REPLY, seal=seal) | content.header, content.body)

    def _admit(
        self, store: ClientStore, packet: Packet, request_id: RequestId, request: Request
    ) -> tuple[Tree | None, str, Packet | None, KeptProgress | None]:
        """Count a request, or refuse it. A refusal leaves the store as it was.

        Returns:
            The local state from which the task starts, the digest of all that decides the reply, the reply if the
            client has already sent one that it cannot compute a second time, and what keeps the progress of the task.
        """
        with store.transaction() as memory:
            check_fresh(memory, request_id)  # first, because a stale request gets no reply and must cost nothing
            local = self._fitting(state_before(memory, request_id), request, request_id.client)
        use, seconds = digest_of_use(request, local or {}, packet, self.conditions), self.checkpoint_seconds
        progress = KeptProgress(store, request_id, use, seconds) if seconds else None
        with store.transaction() as memory:
            if self.purpose is not None:
                admit_purpose(memory, self.purpose)
            admit(memory, self.engine.limits, request)
            known = kept_reply(memory, request_id, use) if self._adds_noise(request) else None
            if known is None:
                forget_replies(memory, request_id)
                self._count(memory, request, bool(places_of(memory)))
            admit_secrets(memory, request, local, packet, self.conditions)
            begin(memory, request_id, again=known is not None)
            forget_trainings(memory, progress)
        return local, use, known, progress

    def _keep(
        self, memory: Memory, request_id: RequestId, request: Request, before: Tree | None, left: Tree, kept: int
    ) -> None:
        """Keep the client's local state if the task has replaced it, and the conditions of the secrets in it."""
        if left is not before:
            keep(memory, request_id, left, self.engine.registry[request_id.client].modalities, kept)
        bind_secrets(memory, request, left, self.conditions)

    def _evaluations(self, device: DeviceStore, request_id: RequestId) -> Callable[[str], EgressError | None] | None:
        """Return a function that counts an evaluation, if the device limits them, and returns the refusal or None."""
        if not self.terms.evaluation:
            return partial(self._unfit, "evaluation", "its own test or validation rows", request_id.client)
        limits = self.engine.limits

        def evaluates(task: str) -> EgressError | None:
            try:
                with device.transaction(request_id.run, request_id.client) as memory:
                    admit_today(memory, limits, "max_evaluations_per_day", task)
            except EgressError as error:
                return error
            return None

        return None if limits.max_evaluations_per_day is None else evaluates

    def _trainings(self, client: int) -> Callable[[str], EgressError | None] | None:
        """Return a function that refuses to read the training rows, or None if that is allowed."""
        return None if self.terms.training else partial(self._unfit, "training", "the training rows", client)

    def _unfit(self, key: str, rows: str, client: int, task: str) -> EgressError:
        where = f"{header(self.purpose or '')} {key}"
        return EgressError(
            f"client {client} refused task {task}: {where} = false of the device, and the task reads {rows}. "
            f"It would be allowed if the device's policy file said: {where} = true"
        )

    def _refuse_made_model(self, request: Request, got: Message, client: int) -> None:
        """Refuse a model that could only read the data; see `Policy.accepts`. It costs no privacy budget.

        Raises:
            EgressError: the message holds parameters or prototypes that the policy does not let come in.
        """
        gate = self.engine.node((client,), self.engine.context(client))
        if why := gate.rejection(request, cut(got, gate.blocks)):
            raise EgressError(why)

    def _adds_noise(self, request: Request) -> bool:
        """Return whether the reply gets noise from the operating system. It then cannot be computed a second time."""
        mechanism = self.engine.privacy
        return (
            mechanism is not None and mechanism.secure and not mechanism.central and request.name in mechanism.protected
        )

    def _count(self, memory: Memory, request: Request, has_state: bool) -> None:
        """Count a new reply with noise in what the run's [privacy] and the device's privacy budget allow."""
        mechanism = self.engine.privacy
        admit_release(memory, mechanism, request)
        mixed = self.engine.announcement(self.engine.context(memory.client).modalities).policy.mixing.blocks
        admit_state(memory, self.release, mixed, has_state)
        required = self.engine.required
        if mechanism is not None and request.name in mechanism.protected:
            spend(memory, required, self.release)
        engine = self.engine
        subsets = subsets_in(request.reply, engine.algorithm.evaluation.subsets, engine.model.modalities)
        spend(memory, required, required.score_release(request.reply, subsets))

    def _released_again(self, engine: Sequential, request: Request, client: int, got: Message, known: Packet) -> Packet:
        """Pass a message, and the reply that has already been sent, through the client's gate. Return the reply."""
        gate = engine.node((client,), engine.context(client))
        gate.receive(request, got)
        again = encode(gate.release(request, decode(known, request.reply, limit=self.limit), stacked=False))
        assert again.header == known.header, "a reply is sent again"
        assert bytes(again.body) == bytes(known.body), "a reply is sent again bit for bit"
        return again

    def _received(self, packet: Packet, request: Request, client: int) -> Message:
        """Decode the server's message, and compare it with its declaration and with the model.

        A simulated client checks it too: it is cheap beside the transport.

        Raises:
            BadReply: the server's message is malformed. The exception is named after replies, but here the server
                caused the error, not the client.
        """
        engine = self.engine
        unpacking = None if engine.compression is None else Rounded(engine.compression, request.got)
        got: Message = decode(packet, request.got, limit=self.limit, unpacking=unpacking, shared=True)
        method, private = engine.algorithm, engine.algorithm.private_names(engine.model)
        template = method.received_template(request.name, engine.model)
        template = {name: value for name, value in template.items() if name not in private}
        classes = engine.population.columns.num_classes
        everyone = tuple(engine.model.shapes)
        validator = MessageValidator(template, engine.model, everyone, engine.objective, classes)
        num_rows = max(len(engine.rows(client)), *(len(engine.own_rows(client, kind)) for kind in HELD_OUT))
        shapes, may_lack = self.ranks.shapes(client), method.may_lack(request.name)
        receiver = Receiver(engine.registry.owned(client), num_rows, shapes, may_lack)
        validator.check_received(got, request.got, receiver)
        return got

    def _book(self, store: ClientStore, request_id: RequestId, entries: list[Entry], *, sent: bool) -> str:
        """Write the ledger's entries to the client's ledger file and the device's audit log, before the reply leaves.

        Args:
            store: the client's part of the store.
            entries: the ledger's entries of this request.
            sent: whether the reply will leave. If not, this writes only received and refused parts.

        Returns:
            The hash of the seal that follows the rows in the audit log, or "" in a simulation.

        Raises:
            OSError, CheckpointError: a file cannot be written. In this case, neither file has the entries, and no reply
                may leave the client.
        """
        if not sent:
            entries = [entry for entry in entries if entry.destination == TO_CLIENT or not any(entry.allowed)]
        path = store.folder / LEDGER
        before = book(path, lines(entries, request_id.run))
        if self.audit is None:
            return ""
        with undone(path, before):
            return self.audit.append(entries, request_id.run)

    def _fitting(self, found: tuple[Tree, tuple[str, ...]] | None, request: Request, client: int) -> Tree | None:
        """Return the client's local state before a task, or None if there is no state yet.

        If the client's modalities have changed since the state was written, tensors with the right shape are kept. All
        other tensors start with their initial values.
        """
        if found is None or found[1] == self.engine.registry[client].modalities:
            return None if found is None else found[0]
        engine, before = self.engine, found[0]
        first = first_local(engine.algorithm, engine.context(client), request.seed, client, engine.device)
        fits = {name for name, value in first.items() if name in before and before[name].shape == value.shape}
        return {name: before[name] if name in fits else value for name, value in first.items()}

    def _check_held(self, packet: Packet, client: int) -> None:
        """Refuse a request if its list of modalities differs from the client's current modalities.

        Raises:
            BadReply: the client's modalities have changed since it enrolled.
        """
        now, then = list(self.engine.registry.owned(client)), packet.header.get("modalities")
        if now != then:
            raise BadReply(f"is for modalities {then}, client {client} has {now} now; start the server again")

    @cached_property
    def _frozen(self) -> str:
        return digest(self.engine.model.unsent)

    def _check_frozen(self, packet: Packet, client: int) -> None:
        """Refuse a request if the server's frozen parameters or constant buffers differ from the client's.

        Messages never hold them.

        Raises:
            BadReply: they differ.
        """
        if Facts.read(packet.header).frozen != self._frozen:
            raise BadReply(
                f"is for a model whose frozen parameters or constant buffers differ from those of client {client}. "
                "Give the server and the client the same file of weights. Random values can differ between kinds of "
                "machines, so save such values to a file and load them from it"
            )

    def _check_rounds(self, round: int, rounds: int) -> None:
        """Refuse a request of a round that the recipe does not have.

        Learning rates and the strengths of proximal terms follow schedules over the rounds of the recipe. In a later
        round, a learning rate could have any size and sign, and the checks of the recipe's options (`limit_checks`)
        would be useless.

        Raises:
            BadReply: the round is after the last one, or the run has more rounds than the recipe.
        """
        most = rounds if self.rounds is None else self.rounds
        if not round <= rounds <= most:
            raise BadReply(
                f"is for round {round} of {rounds}, but the recipe on the device has {most} rounds. Send the recipe "
                "with which the run was started, or start the run again with a larger number of rounds"
            )

    def _ask(self, packet: Packet, request_id: RequestId) -> Request:
        """Read the request from a packet's header.

        Raises:
            BadReply: the header is malformed, or the algorithm has no such task.
            EgressError: the reply would pass through the server, and this client does not allow the server to see it.
        """
        own = packet.header.get("held_out", HELD_OUT[0])
        match packet.header:
            case {"task": str(name), "seed": int(seed), "rounds": int(rounds), "turn": int(turn)} if (
                own in HELD_OUT
                and all(
                    type(n) is int and 0 <= n < LARGEST_NUMBER
                    for n in (seed, rounds, turn, packet.header.get("kept", 0))  # a truth value is an int too
                )
            ):
                task = tasks_of(self.engine.algorithm).get(name)
            case _:
                raise BadReply("is not a request that can be read")
        if task is None:
            raise BadReply(f"asks for the task '{name[:80]}', which {type(self.engine.algorithm).__name__} lacks")
        self._check_rounds(request_id.round, rounds)
        request = Request(task, name, request_id.round, rounds, request_id.request, seed, turn, held_out=own)
        if request.scope == "silo" and not self.relay:
            raise EgressError(
                f"client {request_id.client} refused task {name}: its reply is for the silo, but would pass through "
                'the server, which sees it. It would run if the client\'s configuration said: relay="server-sees", or '
                'relay="edge" and this server were the edge of its silo'
            )
        return request


def book(path: Path, rows: Iterable[str]) -> int:
    """Add all rows to a client's ledger file, or none of them. Return the file's previous size.

    Raises:
        OSError: the rows cannot be written. In this case, no reply may leave the client.
    """
    return append_whole(path, "".join(row + "\n" for row in rows).encode(), private=True)
