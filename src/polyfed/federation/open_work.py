"""What clients still work on while the server goes on, and which of their replies a buffer takes.

`Federation.gather` fills a buffer. On devices, a slow client's reply simply comes later. In a simulation, every reply
is computed when its client is asked, and lies in the state of the server until its simulated time has come. So nothing
depends on the machine, and a checkpoint holds all that a resumed run needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from polyfed.core.messages import Message, map_tensors
from polyfed.federation.replies import Replies, stacked


@dataclass(frozen=True)
class OpenWork:
    """A request that a client has not answered yet, as far as the server knows.

    Attributes:
        client: the client.
        round: the round in which it was asked. With `number`, it names the request, and it decides the random numbers.
        number: number of the request in that round.
        changes: block -> how often the server had changed it when the client was asked.
        arrives_s: when the reply arrives, in simulated seconds since the start of the run; 0 on a device.
        reply: the reply of a simulated client. None on a device, whose reply does not exist yet.
    """

    client: int
    round: int
    number: int
    changes: Mapping[str, int] = field(default_factory=dict)
    arrives_s: float = 0.0
    reply: Message | None = None


@dataclass(frozen=True)
class Buffer:
    """The replies that the server uses together, and what is still open.

    Attributes:
        replies: the replies. Clients that failed are missing from it, with the reason.
        works: the work that each of them belongs to, by client.
        open: the work of the other clients, in the order of their numbers.
        now_s: simulated seconds since the start of the run.
    """

    replies: Replies
    works: Mapping[int, OpenWork]
    open: tuple[OpenWork, ...]
    now_s: float = 0.0


def first_to_arrive(
    fresh: Replies,
    works: Sequence[OpenWork],
    enough: int,
    least: int = 1,
    *,
    now_s: float = 0.0,
    interval_s: float | None = None,
) -> Buffer:
    """Return a buffer with the first `enough` replies, in the order of their simulated arrival.

    Of replies that arrive at the same time, those to older requests come first, and then those of lower clients.

    Args:
        fresh: the replies to the newest request.
        works: what all clients work on; that of the clients in `fresh` has no reply yet.
        enough: number of replies that fill the buffer.
        least: number of replies for which the server waits longer than `interval_s`.
        now_s: the time of the newest request.
        interval_s: the server uses a buffer that is not full after so many seconds. None: it waits until it is full.
    """
    order = sorted(works, key=lambda work: (work.arrives_s, work.round, work.client))
    taken = order[:enough]
    end = max(now_s, taken[-1].arrives_s if taken else now_s)
    if interval_s is not None and end > now_s + interval_s:
        in_time = sum(work.arrives_s <= now_s + interval_s for work in taken)
        taken = taken[: max(in_time, least)]
        end = max(now_s + interval_s, taken[-1].arrives_s)
    late = {work.client: work.reply for work in taken if work.reply is not None}
    left = [work for work in works if work not in taken]
    still = {work.client for work in left}
    parts = [part for one in fresh.parts if (part := one.without(still)) is not None]
    parts = sorted([*parts, *stacked(dict(late))], key=lambda part: part.clients[0])
    kept = [
        replace(work, reply=map_tensors(fresh[work.client], torch.clone)) if work.reply is None else work
        for work in left
    ]
    open = tuple(sorted(kept, key=lambda work: work.client))
    return Buffer(Replies(parts, fresh.missing), {work.client: work for work in taken}, open, end)
