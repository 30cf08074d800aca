"""Corrupt messages in the variants of every method: private blocks and secure aggregation.

One honest round gives the messages of a variant; each is then corrupted by itself, in both directions. LoRA ranks of
clients are in `tests/model/test_lora_ranks.py`, whole runs in `test_malformed.py` and
`tests/attacks/test_hostile_messages.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laws.corruptions import CASES, secured
from laws.rows import ROWS
from laws.test_laws import world
from polyfed.algorithms import ALGORITHMS
from polyfed.core.errors import BadReply, RecipeError
from polyfed.core.messages import OF_THE_MODEL, Message, cut
from polyfed.core.request import Request, Send
from polyfed.core.tree import Tree
from polyfed.deploy.device.runtime import ClientRuntime
from polyfed.engines.base import Engine
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.running.assembly import Assembly, assemble
from polyfed.federation.replies import Answer, Replies, stacked
from polyfed.federation.wire.wire_format import encode
from polyfed.laws.replies import corruptions, everybody, unlike
from world import through

Seen = dict[str, tuple[Request, Send, Answer]]
"""Task -> its first request, what was sent, and the answers."""

PRIVATE = (("head",), ("encoders",), ("a",))
NEWER = ("apfl", "ditto", "fedbn", "feddyn", "fednova", "fedrep", "lg-fedavg", "mfedmc", "pfedme")


OF_AVERAGES = [name for name in sorted(ALGORITHMS) if "private" in ALGORITHMS[name].__dataclass_fields__]
"""The methods that may have private blocks or masked replies; some refuse one of them."""


VARIANTS: dict[str, Callable[[str], Recipe]] = {
    **{f"private {blocks[0]}": lambda name, b=blocks: everybody(world(name, private=b)) for blocks in PRIVATE},  # type: ignore[misc]
    "secure aggregation": lambda name: secured(name),
}


def recorded(made: Recipe) -> tuple[Assembly, Seen]:
    """The parts of a run, and its messages in a round and an evaluation."""
    made = replace(made, clients=replace(made.clients, personal_test=0.2), rounds=1)
    train = getattr(made.algorithm, "train", None)
    if train is not None:
        made = replace(made, algorithm=replace(made.algorithm, train=replace(train, batch_size=64, epochs=1)))  # type: ignore[call-arg]
    parts, seen = assemble(made), Seen()
    answer = parts.fed.engine.answer

    def noted(request: Request, clients: Any, send: Send) -> Answer:
        got = answer(request, clients, send)
        seen.setdefault(request.name, (request, send, got))
        return got

    parts.fed.engine.answer = noted  # type: ignore[method-assign]
    parts.algorithm.evaluate(through(parts, 1), parts.fed)
    return parts, seen


def faults_of_the_server(parts: Assembly, seen: Seen) -> Iterator[str]:
    """Each corrupt reply that the server does not drop by the name of the field, or with which it drops another."""
    for task, (request, _, got) in seen.items():
        honest = dict(Replies(got.parts))
        if not honest or min(honest) < 0:
            continue
        bad = next((client for client, reply in honest.items() if any(map(len, trees(reply)))), min(honest))
        for field, said in honest[bad].declared.items():
            value = getattr(honest[bad], field)
            for how, change in corruptions(said, received=False).items():
                if not unlike(value, changed := change(value)):
                    continue
                replies = honest | {bad: replace(honest[bad], **{field: changed})}
                missing = dict[int, str]()
                for part in stacked(dict(replies)):
                    parts.fed._inspect(request, part, missing, None)
                if field not in missing.get(bad, "") or len(missing) > 1:
                    yield f"{task}.{field} with {how}: {missing}"


def trees(reply: Message) -> Iterator[Tree]:
    return (value for name in reply.kinds if isinstance(value := getattr(reply, name), dict))


def faults_of_a_device(parts: Assembly, seen: Seen, folder: Path) -> Iterator[str]:
    """Each corrupt message that a device does not refuse by the name of the field; it must take the honest one."""
    engine: Any = parts.engine
    assert isinstance(engine, Engine)
    runtime, method = ClientRuntime(engine, folder, ranks=parts.fed.ranks), parts.algorithm  # type: ignore[arg-type]
    kept = {name: parts.initial[name] for name in method.private_names(parts.model)}
    for task, (request, send, got) in seen.items():
        client = min((c for part in got.parts for c in part.clients), default=-1)
        if client < 0:
            continue
        msg = cut(send if isinstance(send, Message) else send[client], engine.context(client).blocks)
        runtime._received(encode(msg), request, client)
        for field, said in msg.declared.items():
            value = getattr(msg, field)
            whole = not said.optional and not (said.kind in OF_THE_MODEL and method.may_lack(task))
            changes = corruptions(said, received=True, whole=whole)
            if said.kind in OF_THE_MODEL:
                changes |= {f"the private {n}": lambda v, n=n: v | {n: kept[n]} for n in kept}  # type: ignore[misc]
            for how, change in changes.items():
                if not unlike(value, changed := change(value)):
                    continue
                try:
                    runtime._received(encode(replace(msg, **{field: changed})), request, client)
                except BadReply as error:
                    if field in str(error):
                        continue
                yield f"{task}.{field} with {how} is taken"


def taken(parts: Assembly, seen: Seen, folder: Path) -> list[str]:
    """Every corruption of a field of a message that the server or a device does not refuse."""
    return [*faults_of_the_server(parts, seen), *faults_of_a_device(parts, seen, folder)]


def test_the_law_knows_every_method() -> None:
    assert set(CASES) >= set(ROWS) == set(ALGORITHMS) >= set(NEWER)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OF_AVERAGES)
def test_corrupt_messages_are_refused_in_every_variant(name: str, variant: str, tmp_path: Path) -> None:
    try:
        parts, seen = recorded(VARIANTS[variant](name))
    except RecipeError as why:
        pytest.skip(f"{why!s:.80}")
    assert seen
    assert not (found := taken(parts, seen, tmp_path)), "\n".join(found)
