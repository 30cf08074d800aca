"""The privacy budget of a device: epsilon of everything that it has sent with noise, in all runs together.

If the device counted each run separately, a server could start many runs, or rename a run, and get the full budget each
time. So the device counts over all runs, in a file in its state folder. A repeated request counts again, because its
reply has new noise.
"""

import fcntl
import json
import math
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from polyfed.core.errors import CheckpointError, EgressError
from polyfed.core.system.files import read_notes, replace_text
from polyfed.privacy.differential.accounting import epsilon_of_all
from polyfed.privacy.differential.guarantee import number
from polyfed.privacy.egress.requirements import Release, Requirements

SPENT = "privacy-spent.json"
"""File in the state folder of a device: `unit noise` -> number of Gaussian mechanisms with this noise."""

LOCK = "privacy-spent.lock"
"""File that a process locks while it counts, because several runs may ask the same device at once."""


PROTECTION = "protection.json"
"""File in the folder of a client and a run: the unit that [privacy] protected in the newest request, and the blocks
that could reveal other modalities (`polyfed.privacy.egress.mixing`)."""

UNITS = ("client", "example")
"""The units that a count can have."""


def refuse_spent(required: Requirements, release: Release | None, folder: Path, client: int, rounds: int) -> None:
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

    Raises:
        EgressError: the replies of these rounds would exceed the budget. The text says for how many rounds the budget
            is enough.
        CheckpointError: the file is damaged.
    """
    if release is None or rounds < 1:
        return
    spent = _read(folder)
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


def spend(required: Requirements, release: Release | None, folder: Path, client: int) -> None:
    """Add the cost of one reply to the budget file, or refuse the request if the budget does not allow the reply.

    The device calls this function before it runs the task that makes the reply. The arguments and errors are those of
    `refuse_spent`.
    """
    if release is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        spent = _with(_read(folder), release)
        _checked(required, spent, client)
        replace_text(folder / SPENT, json.dumps(spent))


def admit_state(release: Release | None, mixed: Collection[str], folder: Path, has_state: bool, client: int) -> None:
    """Refuse local state from an earlier recipe of the run if it can reveal more than the present recipe allows.

    A server may change the recipe within a run. If the earlier model mixed modalities, the local state of a block can
    hold what another modality may not send, and the present model would let this block leave.

    With `unit = "client"`, the client trains its local state without noise in the gradients of rows. If a later reply
    with `unit = "example"` depends on this state, the noise of the reply does not hide the rows that the state was
    trained on. This second check is made only if the device limits epsilon.

    Args:
        release: the noise of one reply and the number of its Gaussian mechanisms. They determine how much the reply
            adds to the device's epsilon. None if the device does not limit epsilon.
        mixed: the modalities whose blocks can reveal other modalities under the present recipe.
        folder: the folder of the client and the run.
        has_state: whether the folder holds local state.
        client: the client's number.

    Raises:
        EgressError: the recipe says `unit = "example"`, and the local state is from a request without this unit. Or
            the state is from a model that mixed a block with other modalities, and the present model does not.
        CheckpointError: the file is damaged.
    """
    now = {"unit": "" if release is None else release.unit, "mixed": " ".join(sorted(mixed))}
    before = {"unit": "", "mixed": ""} | read_notes(folder / PROTECTION, str)
    if has_state and (apart := set(before["mixed"].split()) - set(mixed)):
        raise EgressError(
            f"client {client} refused: the local state of this run was trained with a model that mixes modalities, so "
            f"'{min(apart)}' can reveal other modalities, although the present model does not mix them. Begin a new run"
        )
    if now["unit"] == "example" and before["unit"] != "example" and has_state:
        raise EgressError(
            f'client {client} refused: the recipe says [privacy] unit = "example", and the local state of this run was '
            "trained without noise for single rows. Begin a new run"
        )
    if now != before:
        replace_text(folder / PROTECTION, json.dumps(now))


def _read(folder: Path) -> dict[str, int]:
    """Return the content of the budget file: `unit noise` -> number of Gaussian mechanisms with this noise.

    Raises:
        CheckpointError: the file is damaged: a unit, a noise or a count in it is not valid. A noise of NaN is not
            valid, because the accountant would compute epsilon 0 from it.
    """
    path = folder / SPENT
    counts = read_notes(path, lambda value: value)
    for key, count in counts.items():
        unit, _, noise = key.partition(" ")
        if unit not in UNITS or type(count) is not int or count < 1 or not _is_noise(noise):
            raise CheckpointError(f"{path} is damaged: '{key}' is {count!r}. Restore it from a copy")
    return counts


def _is_noise(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _with(spent: dict[str, int], release: Release, replies: int = 1) -> dict[str, int]:
    """Return how often the device has used each Gaussian mechanism, after this number of further replies.

    If the task of the reply does not train, it uses no rows, and the counts stay the same.
    """
    if not release.uses:
        return spent
    key = f"{release.unit} {release.noise!r}"
    return spent | {key: spent.get(key, 0) + release.uses * replies}


def _checked(required: Requirements, spent: dict[str, int], client: int) -> None:
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


def _epsilon(required: Requirements, spent: dict[str, int], client: int) -> float:
    """Return the epsilon of these counts at the delta of the device.

    Noise for a whole client also protects each of its rows. Noise for single rows does not protect a whole client.

    Raises:
        EgressError: the device protects its whole data, and some of the counts are for single rows.
    """
    assert required.delta is not None, "max_epsilon has a delta"
    uses: Counter[float] = Counter()
    for key, count in spent.items():
        unit, _, noise = key.partition(" ")
        if required.unit == "client" and unit == "example":
            raise EgressError(
                f'client {client} refused: [require] unit = "client" of the device, and earlier replies of the device '
                f"protected single rows only. {_cure()}"
            )
        uses[float(noise)] += count
    return epsilon_of_all(uses, required.delta)


def _cure() -> str:
    return f"The owner of the device may raise max_epsilon, or remove {SPENT} of its state folder if the data is new"
