"""Attacks on properties of clients: the modalities that a client holds, which the blocks of its replies reveal."""

from collections import Counter
from collections.abc import Iterator

from polyfed.core.messages import crossings, tensors
from polyfed.core.tree import block_of
from polyfed.experiment.leakage.capture import Capture, CapturedReply
from polyfed.experiment.leakage.findings import Finding, Tally, Target, measured
from polyfed.experiment.leakage.membership import ALL
from polyfed.model import Model

HELD = "modalities held"

ANY = "any"
"""The kind for an attack that reads only the names of blocks."""


def modalities_held(found: Capture) -> Iterator[Finding]:
    """Guess that a client holds exactly the modalities whose blocks it sent. The names of blocks are not secret."""
    population = found.population
    sent: dict[Target, dict[int, set[str]]] = {}
    for reply in found.replies:
        target = Target(HELD, ANY, ALL, reply.seen_by)
        blocks = sent.setdefault(target, {}).setdefault(reply.client, set())
        blocks |= _shown(reply, found.assembly.model) & {*population.columns.modalities}
    for target, shown in sent.items():
        held = {client: frozenset(population.modalities(client)) for client in shown}
        most = Counter(held.values()).most_common(1)[0][1] / len(held)
        tallies = {client: Tally.of(float(shown[client] == held[client]), most) for client in shown}
        yield measured(
            target,
            "names of the blocks",
            tallies,
            remark="the server also learns this at enrolment",
            owners=found.owners,
        )


def _shown(reply: CapturedReply, model: Model) -> set[str]:
    """Return the blocks that the client sent. An attacker can tell them by the names in the reply.

    A field declared with `whole=True` is sent with all its blocks. In such a field, tensors of the head are ignored.
    """
    msg, head = reply.message, {*model.head()}
    blocks = {part.block for part in crossings(msg) if part.field not in msg.whole}
    return blocks | {block_of(key) for name, key, _ in tensors(msg) if name in msg.whole and key and key not in head}
