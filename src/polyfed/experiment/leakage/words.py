"""Attack on texts: the token ids that a client's rows contain.

A batch changes only those rows of a table of embeddings that it looks up, so the change lists the words (Melis, Song,
De Cristofaro, Shmatikov, "Exploiting Unintended Feature Leakage in Collaborative Learning", IEEE S&P 2019).
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polyfed.experiment.leakage.capture import Capture, blocks_of
from polyfed.experiment.leakage.findings import Finding, Target, measured
from polyfed.experiment.leakage.labels import presence

WORDS = "words present"

ONE_TEXT = "all attacked clients have the same words"
"""The remark if there is nothing to rank."""


def words_present(found: Capture) -> Iterator[Finding]:
    """Rank the words by how much the client's training changed their embeddings."""
    sums: dict[Target, dict[int, Tensor]] = {}
    for reply in found.replies if found.num_ids else ():
        for kind in ("parameters", "gradients"):
            for block, part in blocks_of(reply.update(kind)).items():
                if (size := found.num_ids.get(block)) and (change := _table(part, size)) is not None:
                    own = sums.setdefault(Target(WORDS, kind, block, reply.seen_by), {})
                    own[reply.client] = own.get(reply.client, 0) + change
    for target, scores in sums.items():
        truth = {client: _counts(found, target.block, client, len(score)) for client, score in scores.items()}
        # words that all clients or none have, such as padding and most hashes, say nothing of one client
        holders = torch.stack([counts > 0 for counts in truth.values()]).sum(0)
        telling = (holders > 0) & (holders < len(truth))
        scores = {client: score[telling] for client, score in scores.items()}
        yield measured(
            target,
            "rows of the embedding table that changed",
            presence(scores, {client: counts[telling] for client, counts in truth.items()}),
            remark="pairs of words in the right order, of the words that some but not all of these clients have",
            empty=ONE_TEXT,
            owners=found.owners,
        )


def _table(part: Mapping[str, Tensor], size: int) -> Tensor | None:
    """The norms of the changes of the words, float64 (size,), or None if the block has no such table.

    The first matrix with a row for each id is the table: the ids are what an encoder reads first.
    """
    for value in part.values():
        if value.dim() == 2 and len(value) >= size:
            norms: Tensor = value[:size].double().norm(dim=1)
            return norms
    return None


def _counts(found: Capture, modality: str, client: int, words: int) -> Tensor:
    ids = found.samples(modality, found.rows(client)).long().flatten()
    return torch.bincount(ids, minlength=words)
