"""Predictions for the samples of one silo: its devices embed their rows, and its edge matches and fuses them.

Nothing is trained, and nothing of it is for the server: both tasks have the scope `silo`. The devices take the encoders
of a trained model from `[model] init`, as in a warm start, and the edge takes the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms.hfm.messages import Embedded, Evaluated, Ids, Question, Sample, some_rows, whole_batch
from polyfed.algorithms.hfm.samples import SiloSamples
from polyfed.algorithms.hfm.silo_exchange import FromEmbeddings, Vertical
from polyfed.core.batch import Batch
from polyfed.core.errors import TooFewReplies, counted
from polyfed.core.request import HeldOut
from polyfed.core.tree import Tree
from polyfed.federation.federation import Federation
from polyfed.federation.silos.parts import Ask, Part

ROWS = 4096
"""Most rows that a device embeds for one request, so that a message stays small (inferred)."""

OTHERS: tuple[HeldOut, ...] = ("test", "validation")
"""The rows of devices besides their training rows."""


@dataclass(frozen=True)
class SiloAnswers:
    """The model's answers for the samples of a silo.

    Attributes:
        ids: the sample ids, int64 (N,), each once.
        predicted: what the objective predicts, (N, ...).
        present: by modality, whether the answer uses it, bool (N,).
    """

    ids: Tensor
    predicted: Tensor
    present: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Rows:
    """Some rows of a device: their ids (n,), and their embeddings (n, E) by modality."""

    ids: Tensor
    embeddings: Tree


def answered(
    method: Vertical, silo: int, members: Sequence[int], fed: Federation, wanted: Tensor | None
) -> Part[SiloAnswers]:
    """Let the devices of a silo embed their rows, and predict; a part, as in `polyfed.federation.silos.parts`.

    A sample counts as the method's `overlap` says. Labels do not count.

    Args:
        method: the method that trained the model, with `eval_embeddings`.
        members: all devices of the silo.
        fed: its `template` is the trained model.
        wanted: the ids of the wanted samples, int64; None for all. Devices embed no other training rows.

    Raises:
        TooFewReplies: a device gave no answer.
        DataError: the devices' samples do not fit each other, as in training.
    """
    told = yield Ask(method.identify, dict.fromkeys(members, Question()), quorum=False, accept=some_rows)
    _refuse_missing(members, told, "sample ids")
    parts = {client: [one] for client, one in (yield from _trained(method, told, wanted)).items()}
    for held_out in OTHERS:
        having = fed.clients.tested if held_out == "test" else fed.clients.validated
        asked = [client for client in members if client in set(having)]
        own = yield Ask(
            method.embed_own,
            dict.fromkeys(asked, Evaluated({})),
            quorum=False,
            accept=some_rows,
            held_out=held_out,
            if_any=True,
        )
        _refuse_missing(asked, own, f"embeddings of its {held_out} rows")
        for client, reply in own.items():
            kept = _places(reply.ids, wanted)
            rows = {m: h[kept.to(h.device)] for m, h in reply.embeddings.items()}
            parts[client].append(_Rows(reply.ids.cpu()[kept], rows))
    whole = {client: _joined(some) for client, some in parts.items()}
    return _fused(method, silo, whole, fed)


def _trained(method: Vertical, told: Mapping[int, Ids], wanted: Tensor | None) -> Part[dict[int, _Rows]]:
    """Let the devices embed their training rows, some at a time."""
    ids = {client: reply.ids.cpu() for client, reply in told.items()}
    places = {client: _places(own, wanted) for client, own in ids.items()}
    found: dict[int, list[Tree]] = {client: [] for client in ids}
    for start in range(0, max(len(own) for own in places.values()), ROWS):
        asked = {c: Sample(own[start : start + ROWS]) for c, own in places.items() if len(own) > start}
        replies: Mapping[int, Embedded] = yield Ask(method.embed, asked, quorum=False, accept=whole_batch(asked))
        _refuse_missing(list(asked), replies, "embeddings")
        for client, reply in replies.items():
            found[client].append(reply.embeddings)
    return {client: _Rows(ids[client][places[client]], _stacked(trees)) for client, trees in found.items()}


def _places(ids: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the positions of the wanted ids, int64."""
    own = ids.cpu()
    return torch.arange(len(own)) if wanted is None else torch.isin(own, wanted).nonzero().flatten()


def _refuse_missing(asked: Sequence[int], replies: Mapping[int, object], what: str) -> None:
    """Refuse to predict without one of the devices: its modality would look as if the samples lacked it.

    Raises:
        TooFewReplies: a device is missing.
    """
    if missing := [client for client in asked if client not in replies]:
        devices = counted(len(missing), "device", "devices")
        raise TooFewReplies(f"{devices} of the silo sent no {what}: {', '.join(map(str, missing))}")


def _stacked(trees: Sequence[Tree]) -> Tree:
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]} if trees else {}


def _joined(parts: Sequence[_Rows]) -> _Rows:
    """Join the rows of a device; of no rows, there are no embeddings."""
    return _Rows(torch.cat([one.ids for one in parts]), _stacked([one.embeddings for one in parts if len(one.ids)]))


def _fused(method: Vertical, silo: int, rows: Mapping[int, _Rows], fed: Federation) -> SiloAnswers:
    """Match the rows of the devices, and let the head predict."""
    model, objective = fed.context.model, fed.context.objective
    ids = {client: one.ids for client, one in rows.items()}
    owned = {client: fed.clients.owned(client) for client in rows}
    samples = SiloSamples.of(silo, ids, owned, method.overlap, list(rows))
    everywhere = torch.arange(samples.count)
    if not samples.count:
        return SiloAnswers(everywhere, torch.zeros(0, *objective.outputs_shape(model)), {})
    known = torch.zeros(samples.count, dtype=torch.int64)
    for client, one in rows.items():
        known[samples.held(everywhere, client)] = one.ids[samples.own_rows(everywhere, client)]
    sent = {
        client: {m: h[samples.own_rows(everywhere, client).to(h.device)] for m, h in one.embeddings.items()}
        for client, one in rows.items()
    }
    pooled = samples.pooled(everywhere, sent)
    held = {modality for names in owned.values() for modality in names}
    head = {name: fed.template[name] for name in model.head(held)}
    nothing = objective.no_labels(fed.context.num_classes)
    batch = FromEmbeddings(pooled).seen(Batch({}, nothing, everywhere))
    present = {m: there.cpu() for m, there in batch.present.items()}
    with torch.no_grad():
        outputs = model.fuse(head, batch.x, batch)
    return SiloAnswers(known, objective.predicted(outputs).cpu(), present)
