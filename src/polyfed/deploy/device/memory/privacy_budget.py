"""The privacy budget of a device: how many replies it has sent with noise, and the epsilon of all runs together.

If the device counted epsilon for each run separately, a server could start many runs, or rename a run, and get the full
budget each time. So it counts over all runs. Noise comes from the operating system, so a reply that is computed again
counts again.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from polyfed.core.errors import EgressError
from polyfed.core.request import Request
from polyfed.deploy.device.memory.store import DeviceStore, Memory
from polyfed.privacy.differential.accounting import epsilon_of_all
from polyfed.privacy.differential.guarantee import number
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.egress.requirements import Release, Requirements

Spent = dict[tuple[str, float], int]
"""(unit, noise) -> number of Gaussian mechanisms with this noise."""


def refuse_spent(
    required: Requirements,
    release: Release | None,
    folder: Path,
    client: int,
    rounds: int,
    scores: Release | None = None,
) -> None:
    """Refuse a run if the budget of the device does not cover the rounds of the run. This spends no budget.

    A server asks a client for at most one such reply in each round. With partial participation, it asks in fewer
    rounds, but only the server decides in how many. So the function counts all rounds, as `unmet` does.

    Args:
        required: the section [require] of the device.
        release: the noise of one reply and the number of its Gaussian mechanisms. They determine how much the reply
            adds to the device's epsilon. None if the device does not limit epsilon.
        folder: the state folder of the device.
        client: the client's number.
        rounds: number of rounds in which the run may still ask for a new reply. With 0, there is nothing to refuse.
        scores: the privacy cost of a score with noise, and in how many rounds the recipe asks for one. None if the
            device adds no noise to scores.

    Raises:
        EgressError: the replies of these rounds would exceed the budget. The text says for how many rounds the budget
            is enough.
        CheckpointError: the store cannot be used.
    """
    if release is None or rounds < 1:
        return
    spent: Spent = {}
    if DeviceStore(folder).begun:  # a check before the first run leaves no file behind
        with DeviceStore(folder).transaction("", client) as memory:
            spent = _read(memory)
    if scores is not None:
        spent = _with(spent, scores, scores.rounds)
    _checked(required, _with(spent, release), client)
    assert required.max_epsilon is not None, "a device without max_epsilon has no budget"
    total = _epsilon(required, _with(spent, release, rounds), client)
    if total <= required.max_epsilon:
        return
    enough, too_many = 1, rounds
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        fits = _epsilon(required, _with(spent, release, middle), client) <= required.max_epsilon
        enough, too_many = (middle, too_many) if fits else (enough, middle)
    raise EgressError(
        f"client {client} refused: [require] max_epsilon = {required.max_epsilon:g} of the device at delta = "
        f"{required.delta:g}. The rest of this budget is enough for {enough} of {rounds} rounds, and {rounds} rounds "
        f"would bring all replies of the device in all runs to epsilon {number(total)}. Lower the number of rounds or "
        f"raise the noise in the recipe. {_cure()}"
    )


def spend(memory: Memory, required: Requirements, release: Release | None) -> None:
    """Add the cost of one reply to the budget, or refuse the request if the budget does not allow the reply.

    The device calls this function before it runs the task that makes the reply. The arguments and errors are those of
    `refuse_spent`.
    """
    if release is None:
        return
    spent = _with(_read(memory), release)
    if required.max_epsilon is not None:
        _checked(required, spent, memory.client)
    rows = [(unit, noise, times) for (unit, noise), times in spent.items()]
    memory.rows.executemany("INSERT OR REPLACE INTO spent VALUES (?, ?, ?)", rows)


def admit_release(memory: Memory, mechanism: Mechanism | None, request: Request) -> None:
    """Count the replies that this client protects with its own noise, and refuse replies beyond what epsilon allows.

    If the noise comes from the operating system, a repeated request counts again, because its reply has new noise.

    Args:
        memory: what the device remembers of the client and the run.
        mechanism: the mechanism of [privacy], or None.

    Raises:
        EgressError: the run has used up its privacy budget on this client.
    """
    if mechanism is None or mechanism.releases is None or request.name not in mechanism.protected:
        return
    this = f"{request.round} {request.number} {request.turn}"  # a text, because a turn may be any whole number
    memory.rows.execute(
        "INSERT INTO releases VALUES (?, ?, ?, 1) ON CONFLICT (run, client, request) DO UPDATE SET times = times + ?",
        (memory.run, memory.client, this, int(mechanism.secure)),
    )
    (sent,) = memory.rows.execute(
        "SELECT sum(times) FROM releases WHERE run = ? AND client = ?", (memory.run, memory.client)
    ).fetchone()
    if request.round > mechanism.releases or sent > mechanism.releases:
        raise EgressError(
            f"client {memory.client} refused task {request.name}: the run's [privacy] allows {mechanism.releases} "
            "replies with noise of this client, and they have been sent. More would raise epsilon: begin a new run"
        )


def admit_state(memory: Memory, release: Release | None, mixed: Collection[str], has_state: bool) -> None:
    """Refuse local state from an earlier recipe of the run if it can reveal more than the present recipe allows.

    A server may change the recipe within a run. If the earlier model mixed modalities, the local state of a block can
    hold what another modality may not send, and the present model would let this block leave.

    With `unit = "client"`, the client trains its local state without noise in the gradients of rows. If a later reply
    with `unit = "example"` depends on this state, the noise of the reply does not hide the rows that the state was
    trained on. This second check is made only if the device limits epsilon.

    Args:
        memory: what the device remembers of the client and the run.
        release: the noise of one reply and the number of its Gaussian mechanisms. They determine how much the reply
            adds to the device's epsilon. None if the device does not limit epsilon.
        mixed: the modalities whose blocks can reveal other modalities under the present recipe.
        has_state: whether the client has local state of this run.

    Raises:
        EgressError: the recipe says `unit = "example"`, and the local state is from a request without this unit. Or
            the state is from a model that mixed a block with other modalities, and the present model does not.
    """
    now, of = ("" if release is None else release.unit, " ".join(sorted(mixed))), (memory.run, memory.client)
    found = memory.rows.execute("SELECT unit, mixed FROM units WHERE run = ? AND client = ?", of).fetchone()
    before = ("", "") if found is None else found
    if has_state and (apart := set(before[1].split()) - set(mixed)):
        raise EgressError(
            f"client {memory.client} refused: the local state of this run was trained with a model that mixes "
            f"modalities, so '{min(apart)}' can reveal other modalities, although the present model does not mix them. "
            "Begin a new run"
        )
    if now[0] == "example" and before[0] != "example" and has_state:
        raise EgressError(
            f'client {memory.client} refused: the recipe says [privacy] unit = "example", and the local state of this '
            "run was trained without noise for single rows. Begin a new run"
        )
    if now != before:
        memory.rows.execute("INSERT OR REPLACE INTO units VALUES (?, ?, ?, ?)", (*of, *now))


def _read(memory: Memory) -> Spent:
    return {(unit, noise): times for unit, noise, times in memory.rows.execute("SELECT unit, noise, times FROM spent")}


def _with(spent: Spent, release: Release, replies: int = 1) -> Spent:
    """Return how often the device has used each Gaussian mechanism, after this number of further replies.

    If the task of the reply does not train, it uses no rows, and the counts stay the same.
    """
    if not release.uses:
        return spent
    key = (release.unit, float(release.noise))
    return spent | {key: spent.get(key, 0) + release.uses * replies}


def _checked(required: Requirements, spent: Spent, client: int) -> None:
    """Refuse one more reply if the counts, which include it, exceed the budget.

    Raises:
        EgressError: epsilon exceeds `max_epsilon`.
    """
    assert required.max_epsilon is not None, "a device without max_epsilon has no budget"
    total = _epsilon(required, spent, client)
    if total > required.max_epsilon:
        raise EgressError(
            f"client {client} refused: [require] max_epsilon = {required.max_epsilon:g} of the device at delta = "
            f"{required.delta:g}, and one more reply would bring all replies of the device in all runs to epsilon "
            f"{number(total)}. {_cure()}"
        )


def _epsilon(required: Requirements, spent: Spent, client: int) -> float:
    """Return the epsilon of these counts at the delta of the device.

    Noise for a whole client also protects each of its rows. Noise for single rows does not protect a whole client.

    Raises:
        EgressError: the device protects its whole data, and some of the counts are for single rows.
    """
    assert required.delta is not None, "max_epsilon has a delta"
    uses: Counter[float] = Counter()
    for (unit, noise), times in spent.items():
        if required.unit == "client" and unit == "example":
            raise EgressError(
                f'client {client} refused: [require] unit = "client" of the device, and earlier replies of the device '
                f"protected single rows only. {_cure()}"
            )
        uses[noise] += times
    return epsilon_of_all(uses, required.delta)


def _cure() -> str:
    return "The owner of the device may raise max_epsilon, or give the device a new state folder if the data is new"
