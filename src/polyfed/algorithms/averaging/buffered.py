"""`Buffered`: the template of averaging methods whose server does not wait for slow clients.

`participation` clients train at a time. As soon as `buffer` of them have replied, the server averages these replies,
and the next round begins: clients that are free receive the new model, and those that still train go on. So the reply
of a slow client enters a later buffer. It belongs to an older model then, and counts by

    s = (1 + tau) ** -exponent

where tau, its *staleness*, is the number of times that the server has changed the model since the client received it.
With several modalities, each block has its own tau: while no reply with audio arrives, audio does not age.

The server moves every late reply to its own model: a parameter y of a client that began at x counts as
w + s (y - x), where w is the model now. Then it calls `merge` as `Averaging` does, so all hooks of that template have
their meaning, and so have the server optimiser and the rules against false replies. A reply to the newest model
stays as it is; without late replies, a method trains bit for bit as on `Averaging`.

Statistics of BatchNorm count as w + s (y - w), so that a variance stays positive, and counters are not scaled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import TypeVar, override

from polyfed.algorithms.averaging.template import Averaging, State, mean_loss
from polyfed.core import keys
from polyfed.core.errors import RecipeError
from polyfed.core.messages import Message
from polyfed.core.option_checks import COST, NOT_NEGATIVE, PLACEBO, POSITIVE, NotSearched, SearchRange
from polyfed.core.problems import Conflict
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.federation.client_registry import ClientRegistry
from polyfed.federation.clock import Timetable
from polyfed.federation.federation import Federation
from polyfed.federation.open_work import Buffer, OpenWork
from polyfed.federation.replies import Replies, ReplyStack, stacked
from polyfed.selection import Uniform

MODEL = "*"
"""The key of `BufferedState.changes` that counts the changes of any block."""


@dataclass(frozen=True)
class BufferedState(State):
    """Server state.

    Attributes:
        open: what clients still work on.
        sent: round -> the message that it sent, for the rounds of `open`.
        changes: block -> how often the server has changed it; `MODEL` for any of them.
        now_s: simulated seconds since the start of the run.
        took_s: simulated seconds of the last round.
        staleness: block -> mean tau of the replies of the last round that hold the block.
    """

    open: tuple[OpenWork, ...] = ()
    sent: dict[int, Message] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    now_s: float = 0.0
    took_s: float = 0.0
    staleness: dict[str, float] = field(default_factory=dict)


B = TypeVar("B", bound=BufferedState, default=Any)
"""The state of a method that extends `Buffered`."""


@dataclass(frozen=True, kw_only=True)
class Buffered(Averaging[B]):
    """The template: average as soon as some of the training clients have replied, and let the others go on.

    `outgoing` must return one message for all clients. `init` of a subclass must return a `BufferedState`.

    Attributes:
        buffer: number of replies that the server averages: a fraction of the clients that train at a time
            (0 < float <= 1), or a count (int >= 1). With 1.0, the server waits for all of them, as FedAvg does.
        exponent: how much less a late reply counts: s = (1 + tau) ** -exponent. 0 counts all alike.
        interval_s: the server averages a buffer that is not full after so many seconds, of simulated time or, on
            devices, of the clock, if `min_replies` replies are there. None: it waits until the buffer is full.
        staleness: what tau counts: changes of a `block` of the model, or of the whole `model`.
        placebo: `shuffled` is a control: the factors s are permuted among the replies of a buffer. `none` is the
            method.
    """

    buffer: Annotated[float | int, SearchRange(0.25, 0.5, 0.75, 1.0, fedavg=1.0)] = 0.5
    exponent: Annotated[float, NOT_NEGATIVE, SearchRange(0.0, 0.25, 0.5, 1.0)] = 0.5
    interval_s: Annotated[float | None, POSITIVE, COST] = None
    staleness: Annotated[Literal["block", "model"], NotSearched("`model` is the paper's, for one modality")] = "block"
    placebo: Annotated[Literal["none", "shuffled"], PLACEBO] = "none"

    completes_private: ClassVar[bool] = True
    captions: ClassVar[Mapping[str, str]] = {
        "staleness": "How often the server had changed a block since the clients of a buffer received it, on average.",
        "training": "How many clients still train when the buffer is full.",
    }
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            key=("selection", "name"),
            when=lambda recipe: type(recipe.algorithm.selector) is not Uniform,
            because="a selector compares the clients of one round, and here each begins when it is free",
            instead="Remove [selection], so that clients are drawn uniformly",
        ),
        Conflict(
            key=("clients", "overselect"),
            when=lambda recipe: recipe.algorithm.selector.overselect is not None,
            because="the buffer leaves nobody out: set [algorithm] buffer below the number of clients that train",
            instead="Remove overselect",
        ),
        Conflict(
            key=("network", "deadline_s"),
            when=lambda recipe: recipe.network is not None and recipe.network.deadline_s is not None,
            because="it drops late replies, and {method} uses them later",
            instead="Remove deadline_s; [algorithm] interval_s is the longest wait for a buffer",
        ),
        Conflict(
            key=("checkpoint", "updates"),
            when=lambda recipe: recipe.checkpoint.updates,
            because="`polyfed contribution` adds updates to the model where they began, and late ones come to another",
            instead="Remove updates",
        ),
        Conflict(
            key=("algorithm", "buffer"),
            when=lambda recipe: _too_many(recipe.algorithm.buffer, recipe.algorithm.selector.participation),
            beside="[clients] participation",
            because="the buffer would never be full",
            instead="Lower buffer, or raise participation",
        ),
    )

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        share = not isinstance(self.buffer, int)
        if not (0 < self.buffer <= 1 if share else self.buffer >= 1):
            raise RecipeError(
                f"[algorithm] buffer = {self.buffer}: must be a fraction above 0 and at most 1, or a count of at "
                "least 1 (1.0 is all clients that train, 1 is one reply)",
                ("algorithm", "buffer"),
            )

    @override
    def init(self, fed: Federation, params: Tree) -> Any:
        state, running = super().init(fed, params), self.selector.needed(fed.clients)
        if _too_many(self.buffer, running):
            raise RecipeError(
                f"[algorithm] buffer = {self.buffer}, but {running} clients train at a time ([clients] participation), "
                "so the buffer would never be full: lower buffer, or raise participation",
                ("algorithm", "buffer"),
            )
        return BufferedState(**vars(state), changes=dict.fromkeys((MODEL, SHARED, *fed.clients.modalities), 0))

    @override
    def round(self, state: Any, fed: Federation) -> Any:
        running = self.selector.needed(fed.clients)
        beginners = self._beginners({work.client for work in state.open}, running, fed)
        send = self.outgoing(state, beginners, fed)
        if not isinstance(send, Message):
            raise RecipeError(f"{type(self).__name__}: `outgoing` of a buffered method returns one message for all")
        buffer = fed.gather(
            self.update,
            beginners,
            send,
            open=state.open,
            sent=state.sent,
            changes=state.changes,
            enough=self.merges(fed.clients),
            now_s=state.now_s,
            interval_s=self.interval_s,
        )
        rounds, sent = {work.round for work in buffer.open}, {**state.sent, fed.round: send}
        moved = self._moved(buffer, sent, state, fed)
        state = state.with_(
            open=buffer.open,
            sent={round: message for round, message in sent.items() if round in rounds},
            now_s=buffer.now_s,
            took_s=buffer.now_s - state.now_s,
            staleness={},
        )
        if not buffer.replies:
            return state
        seen = self._staleness(buffer, state)
        after = self.merge(state.with_(train_loss=mean_loss(buffer.replies, fed), staleness=seen), moved, fed)
        changed = {MODEL, *seen}
        return after.with_(changes={block: count + (block in changed) for block, count in state.changes.items()})

    @override
    def merges(self, clients: ClientRegistry) -> int:
        given = self.buffer
        return given if isinstance(given, int) else max(1, round(given * self.selector.needed(clients)))

    def _beginners(self, busy: set[int], running: int, fed: Federation) -> list[int]:
        """Return the clients that begin now: as many as are missing from `running`, drawn from those that are free."""
        free = [client for client in fed.clients.eligible if client not in busy]
        count = min(max(running - len(busy), 0), len(free))
        return [free[place] for place in keys.choice(keys.key(fed.seed, "cohort", fed.round), len(free), count)]

    def _taus(self, work: OpenWork, changes: Mapping[str, int]) -> dict[str, int]:
        """Return tau by block: how often the server has changed it since a client received it."""
        taus = {block: count - work.changes.get(block, 0) for block, count in changes.items()}
        return taus if self.staleness == "block" else dict.fromkeys(taus, taus[MODEL])

    def _factors(self, buffer: Buffer, state: Any, fed: Federation) -> dict[int, dict[str, float]]:
        """Return, for each client of a buffer, the factor s of each block."""
        clients = list(buffer.replies)
        taus = {client: self._taus(buffer.works[client], state.changes) for client in clients}
        factors = {
            client: {block: (1.0 + tau) ** -self.exponent for block, tau in of.items()} for client, of in taus.items()
        }
        if self.placebo == "none":
            return factors
        order = keys.permutation(keys.key(fed.seed, "buffered-placebo", fed.round), len(clients)).tolist()
        return {client: factors[clients[place]] for client, place in zip(clients, order, strict=True)}

    def _moved(self, buffer: Buffer, sent: Mapping[int, Message], state: Any, fed: Federation) -> Replies:
        """Return the replies as if all clients had begun at the model now. Replies to this model stay as they are."""
        factors, parts, changed = self._factors(buffer, state, fed), list[ReplyStack](), dict[int, Any]()
        for part in buffer.replies.parts:
            if all(self._is_fresh(buffer.works[client], factors[client], state) for client in part.clients):
                parts.append(part)
                continue
            for client in part.clients:
                reply: Any = buffer.replies[client]
                began: Any = sent[buffer.works[client].round]
                start, now = (_of(client, message, fed) for message in (began, replace(began, params=state.params)))
                params = {
                    name: _shifted(
                        value, start.params[name], now.params[name], factors[client][block_of(name)], trained
                    )
                    for name, value in reply.params.items()
                    for trained in [not fed.context.model.is_buffer(name)]
                }
                changed[client] = replace(reply, params=params)
        both = sorted([*parts, *stacked(changed)], key=lambda part: part.clients[0])
        return Replies(both, buffer.replies.missing)

    def _is_fresh(self, work: OpenWork, factors: Mapping[str, float], state: Any) -> bool:
        """Return whether a reply belongs to the model as it is, and counts in full."""
        same = all(work.changes.get(block, 0) == count for block, count in state.changes.items())
        return same and all(factor == 1.0 for factor in factors.values())

    def _staleness(self, buffer: Buffer, state: Any) -> dict[str, float]:
        """Return the mean tau of each block over the replies that hold it."""
        result: dict[str, list[int]] = {}
        for part in buffer.replies.parts:
            for block in {block_of(name) for name in part.message.params}:  # type: ignore[attr-defined]
                taus = (self._taus(buffer.works[client], state.changes)[block] for client in part.clients)
                result.setdefault(block, []).extend(taus)
        return {block: sum(taus) / len(taus) for block, taus in sorted(result.items())}

    @override
    def pending(self, state: Any) -> Mapping[int, int]:
        return {work.client: work.round for work in state.open}

    @override
    def simulated_seconds(self, state: Any, times: Timetable) -> float:
        return float(state.took_s)

    @override
    def observe(self, state: Any) -> dict[str, float]:
        result = {f"staleness.{block}": tau for block, tau in state.staleness.items()}
        return result | {"training": float(len(state.open))}

    @override
    def concerns(self, logged: Sequence[Mapping[str, float]]) -> list[str]:
        taus = [value for row in logged for name, value in row.items() if name.startswith("staleness.")]
        if not taus or max(taus) > 0:
            return []
        return [
            f"no reply came late in {len(logged)} rounds, so the server waited for everybody, as fedavg does. Set "
            "buffer below the number of clients that train at a time ([clients] participation)"
        ]

    @override
    def idle_options(self, fed: Federation) -> dict[str, str]:
        idle = super().idle_options(fed)
        if fed.clock is None and fed.holding is None:
            idle["interval_s"] = "a simulation without [network]"
        return idle | ({} if self.exponent else {"staleness": "exponent = 0", "placebo": "exponent = 0"})

    @property
    @override
    def single_replies(self) -> str:
        return "a buffer mixes replies to requests of several rounds, which are not added as they are"


def _too_many(buffer: float, running: float) -> bool:
    """Return whether a buffer that is given as a count is larger than a number of clients that is a count, too."""
    return isinstance(buffer, int) and isinstance(running, int) and buffer > running


def _of(client: int, message: Message, fed: Federation) -> Any:
    """Return a message as this client receives it: with adapters of its own LoRA rank."""
    sized = fed.ranks.sized(message, [client])
    return sized if isinstance(sized, Message) else sized[client]


def _shifted(y: Tensor, start: Tensor, now: Tensor, factor: float, trained: bool) -> Tensor:
    """Return a tensor of a late reply as a tensor near the model now; see the module's docstring."""
    if not y.is_floating_point() or (factor == 1.0 and torch.equal(start, now)):
        return y
    wide = torch.promote_types(y.dtype, torch.float32)  # 16-bit types would lose the difference
    base = (start if trained else now).to(wide)
    return (now.to(wide) + factor * (y.to(wide) - base)).to(y.dtype)
