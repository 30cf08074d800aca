"""Stand-ins for the embedding of a modality that a row lacks: class prototypes, or the embedding of a zero sample.

With `[model] absent = "prototypes"`, the block of each modality has a buffer with the mean embedding of every class,
which a method fills (`algorithms/modalities/pmcmfl.py`). The class of a new row is unknown, so its stand-in for
modality m is a mean of the prototypes of m. Their weights are the probabilities of the classes by the modalities that
the row has: softmax over c of the negative distance to the prototype of class c, summed over these modalities. A class
counts if it has a prototype in m and in each modality of the row. Without such a class, or without any modality, the
embedding stays zero.

With `absent = "input"`, the encoder of m reads a sample of zeros. A client without m has no block of m, so the block
`shared` has a buffer for each modality, in which the server puts the result for the clients (`algorithms/averaging`).

Shape letters: `B` rows, `C` classes, `E` width of the embedding, `T` time steps.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyfed.core.tree import SHARED

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


ZERO_INPUT = "zero_input"
"""Name of the module of `ZeroInputs` in the shared block: `shared.zero_input.audio`."""


class ZeroInputs(nn.Module):
    """A buffer for each modality: what its block makes of a sample of zeros.

    Args:
        sizes: modality -> shape of the buffer: that of an embedding, or of what the modality's part of the fusion
            makes of it.
    """

    def __init__(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for modality, shape in sizes.items():
            self.register_buffer(_buffer(modality), torch.zeros(shape))


class Given(nn.Module):
    """Stands for the part of the fusion of a modality whose block is not here: it returns a given result (J,)."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    @override
    def forward(self, z: Tensor) -> Tensor:
        return self.result.expand(z.shape[0], *self.result.shape)


def _buffer(modality: str) -> str:
    return f"{modality}_embedding"  # an nn.Module has attributes such as `training`


def zero_input_name(modality: str) -> str:
    """Return the name of a modality's buffer of `ZeroInputs` in a Tree."""
    return f"{SHARED}.{ZERO_INPUT}.{_buffer(modality)}"


def is_zero_input(name: str) -> bool:
    """Return whether a name in a Tree is that of a buffer of `ZeroInputs`."""
    return name.startswith(f"{SHARED}.{ZERO_INPUT}.")


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
    result = {}
    for m in wanted:
        mean, known = near[m]
        counts = possible & known & some.unsqueeze(-1)
        has = counts.any(-1)
        weights = torch.softmax(torch.where(counts | ~has.unsqueeze(-1), score, -torch.inf), -1)
        result[m] = (torch.where(counts, weights, 0.0) @ mean, has)
    return result


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
