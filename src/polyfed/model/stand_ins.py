"""Stand-ins: class prototypes in place of the embedding of a modality that a row lacks.

With `[model] absent = "prototypes"`, the block of each modality has a buffer with the mean embedding of every class,
which a method fills (`algorithms/modalities/pmcmfl.py`). The class of a new row is unknown, so its stand-in for
modality m is a mean of the prototypes of m. Their weights are the probabilities of the classes by the modalities that
the row has: softmax over c of the negative distance to the prototype of class c, summed over these modalities. A class
counts if it has a prototype in m and in each modality of the row. Without such a class, or without any modality, the
embedding stays zero.

Shape letters: `B` rows, `C` classes, `E` width of the embedding, `T` time steps.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

PROTOTYPES = "prototypes"
"""Name of the module of prototypes in the block of a modality: `audio.prototypes.mean`."""

MEAN, KNOWN = "mean", "known"
"""Names of its buffers."""


class ClassPrototypes(nn.Module):
    """The buffers of one modality: the prototypes `mean` (C, E), and `known` (C,), 1 for a class that has one."""

    def __init__(self, classes: int, embedding: int) -> None:
        super().__init__()
        self.register_buffer(MEAN, torch.zeros(classes, embedding))
        self.register_buffer(KNOWN, torch.zeros(classes))


def names_of(modality: str) -> tuple[str, str]:
    """Return the names of a modality's prototypes and of its known classes in a Tree."""
    return f"{modality}.{PROTOTYPES}.{MEAN}", f"{modality}.{PROTOTYPES}.{KNOWN}"


def is_prototype(name: str) -> bool:
    """Return whether a name in a Tree belongs to the prototypes of a modality."""
    return name.partition(".")[2] in (f"{PROTOTYPES}.{MEAN}", f"{PROTOTYPES}.{KNOWN}")


def distances(z_BE: Tensor, mean_CE: Tensor) -> Tensor:
    """Euclidean distance of every row to every prototype, (B, C); its gradient is finite even at distance 0."""
    difference = z_BE.unsqueeze(1) - mean_CE
    return (difference.square().sum(-1) + 1e-12).sqrt()


def stand_ins(
    near: Mapping[str, tuple[Tensor, Tensor]],
    vectors: Mapping[str, Tensor],
    present: Mapping[str, Tensor],
    wanted: Iterable[str],
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each wanted modality the stand-in of every row, (B, E), and whether the row has one, bool (B,).

    Args:
        near: modality -> prototypes (C, E) and which classes have one, bool (C,).
        vectors: modality -> embeddings (B, E) of the modalities in the batch.
        present: modality -> which rows have it, for the modalities that some rows lack.
        wanted: modalities of `near`.
    """
    first = next(iter(vectors.values()))
    score = possible = some = None
    for m, z in vectors.items():
        if m not in near:
            continue
        mean, known = near[m]
        there = present.get(m, torch.ones_like(first[:, 0], dtype=torch.bool))
        own = torch.where(there.unsqueeze(-1), -distances(z.detach(), mean), 0.0)
        fits = known | ~there.unsqueeze(-1)
        score = own if score is None else score + own
        possible = fits if possible is None else possible & fits
        some = there if some is None else some | there
    if score is None or possible is None or some is None:
        return {}
    found = {}
    for m in wanted:
        mean, known = near[m]
        counts = possible & known & some.unsqueeze(-1)
        has = counts.any(-1)
        weights = torch.softmax(torch.where(counts | ~has.unsqueeze(-1), score, -torch.inf), -1)
        found[m] = (torch.where(counts, weights, 0.0) @ mean, has)
    return found


def placed(z: Tensor | None, there: Tensor | None, stand_in: Tensor, steps: tuple[int, ...]) -> Tensor:
    """Return embeddings (B, E) or (B, T, E) in which rows without the modality have their stand-in.

    Args:
        z: the embeddings, or None if the batch lacks the modality.
        there: which rows have the modality, bool (B,); None if all have it.
        stand_in: the stand-ins (B, E).
        steps: (T,) for sequences, in each step of which the stand-in is the same, else ().
    """
    if steps:
        stand_in = stand_in.unsqueeze(1).expand(-1, *steps, -1)
    if z is None or there is None:
        return stand_in if z is None else z
    return torch.where(there.view(-1, *(1,) * (z.dim() - 1)), z, stand_in)
