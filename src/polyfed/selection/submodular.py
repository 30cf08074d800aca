"""Submodular selection by facility location, for DivFL and CMSFed: it chooses a few clients that represent all.

The problem: given distances D between the vectors of all clients, choose a set S with a small cost
G(S) = sum over clients v of min over i in S of D[v, i]. The utility is a constant minus G. It is monotone and
submodular, so a greedy choice reaches at least 1 - 1/e of the best utility (Nemhauser, Wolsey, Fisher, 1978). There are
three greedy algorithms. `greedy` tries every candidate in each pass. `lazy_greedy` makes the same choice with fewer
evaluations (Minoux, 1978). `stochastic_greedy` tries a random sample in each pass (Mirzasoleiman et al., AAAI 2015).
DivFL (Balakrishnan et al., ICLR 2022) uses one matrix D, and CMSFed uses two at the same time.

`Similarity` holds the vectors and D. `Cover` holds a set S to which clients are added one by one, and computes its
cost. Page: docs/algorithms/selection.md.

Shape letters: `N` clients, `P` entries of a vector, `S` candidates.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.tree import keep_on_host


@dataclass(frozen=True)
class Similarity:
    """The last vector of every client, and the distances between these vectors.

    Attributes:
        vectors: (N, P) float32, or (N, `sketch`) after projection.
        known: whether a client has sent a vector, bool (N,).
        distance: Euclidean distances, (N, N) float32, symmetric, zero diagonal; +inf to and from unknown clients.
        sketch: number of entries of a projected vector; 0 keeps the exact vectors.
        key: the key of the random projection.
    """

    vectors: Tensor
    known: Tensor
    distance: Tensor
    sketch: int = 0
    key: int = 0

    def __post_init__(self) -> None:
        """Keep all tensors on the CPU, because greedy choices read distances one by one, which is slow on a GPU."""
        keep_on_host(self, "vectors", "known", "distance")

    @classmethod
    def empty(cls, num: int, size: int, sketch: int = 0, key: int = 0) -> "Similarity":
        """Return a similarity in which no client has sent a vector yet.

        Args:
            num: number of clients.
            size: entries of a vector.
            sketch: number of entries of a projected vector; 0, or at least `size`, keeps the exact vectors.
            key: the key of the random projection.
        """
        sketch = sketch if sketch < size else 0
        distance = torch.full((num, num), float("inf")).fill_diagonal_(0.0)
        return cls(torch.zeros(num, sketch or size), torch.zeros(num, dtype=torch.bool), distance, sketch, key)

    def refreshed(self, fresh: Mapping[int, Tensor]) -> "Similarity":
        """Replace the vectors (P,) of some clients and recompute their distances.

        This is DivFL's "no-overheads" update. Distances between two other clients are not recomputed, even if the
        vectors of these clients are from an early round.
        """
        if not fresh:
            return self
        changed = torch.tensor(sorted(fresh))
        rows = torch.stack([fresh[int(client)].to("cpu", torch.float32) for client in changed])
        vectors, known, distance = self.vectors.clone(), self.known.clone(), self.distance.clone()
        vectors[changed] = sketched(rows, self.sketch, self.key) if self.sketch else rows
        known[changed] = True
        fresh_rows = torch.cdist(vectors[changed], vectors, compute_mode="donot_use_mm_for_euclid_dist")
        fresh_rows[:, ~known] = float("inf")
        distance[changed] = fresh_rows
        distance[:, changed] = fresh_rows.T
        return replace(self, vectors=vectors, known=known, distance=distance)


@dataclass(frozen=True)
class BlockSimilarity:
    """The vectors of clients that lack some blocks, kept block by block, and the distances between the clients.

    The squared distance of two clients is the sum of their squared distances over the blocks. In a block that one of
    the two clients lacks, the squared distance is estimated as m (s r + 1 - s):

    - m: the mean squared distance in this block between clients that have the block. Each block has its own m.
    - r: the squared distance of the two clients over the blocks that both have, divided by the sum of m over these
      blocks. If r is below 1, the two clients are nearer to each other than clients are on average.
    - s: the sum of m over the blocks that both clients have, divided by the sum of m over all blocks. If s is small,
      r was measured on a small part of the model and has little influence. The estimate is then close to m.

    A missing block therefore makes a client neither nearer to the others nor further away (docs/decisions/0017).

    Attributes:
        blocks: for each block, a `Similarity` of the clients' vectors in this block. For a client that lacks the block,
            `known` is False there.
    """

    blocks: dict[str, Similarity]

    @classmethod
    def empty(cls, num: int, sizes: Mapping[str, int], sketch: int = 0, key: int = 0) -> "BlockSimilarity":
        """Return a similarity in which no client has sent a vector yet.

        Args:
            num: number of clients.
            sizes: entries of each block.
            sketch: number of entries to which a client's vector is projected, counted over all blocks. Each block gets
                a share of these entries in proportion to its size. 0 keeps the exact vectors.
            key: the key of the random projections.
        """
        total = max(sum(sizes.values()), 1)
        places = {block: max(1, round(sketch * size / total)) if sketch else 0 for block, size in sizes.items()}
        return cls({b: Similarity.empty(num, n, places[b], keys.key(key, b)) for b, n in sizes.items() if n})

    def refreshed(self, fresh: Mapping[int, Mapping[str, Tensor]]) -> "BlockSimilarity":
        """Replace the vectors of some clients, by block, and recompute their distances; see `Similarity.refreshed`."""
        return BlockSimilarity(
            {b: one.refreshed({c: own[b] for c, own in fresh.items() if b in own}) for b, one in self.blocks.items()}
        )

    @property
    def known(self) -> Tensor:
        """Whether a client has sent a vector of at least one block, bool (N,)."""
        return torch.stack([one.known for one in self.blocks.values()]).any(0)

    @property
    def distance(self) -> Tensor:
        """Distances (N, N) float32, symmetric, zero diagonal; +inf to and from clients that sent no vector."""
        size = len(self.known)
        squared, expected = torch.zeros(size, size), torch.zeros(size, size)
        total = torch.zeros(())
        for one in self.blocks.values():
            own = one.distance.square()
            pairs = one.known & one.known.unsqueeze(1)
            others = pairs & ~torch.eye(size, dtype=torch.bool)
            mean = own[others].mean() if bool(others.any()) else own.new_zeros(())
            squared += torch.where(pairs, own, 0.0)
            expected += torch.where(pairs, mean, 0.0)
            total = total + mean
        share = expected / total.clamp(min=1e-30)
        relative = torch.where(expected > 0, squared / expected.clamp(min=1e-30), 1.0)
        squared += (total - expected).clamp(min=0.0) * (share * relative + 1 - share)
        known = self.known
        squared = squared.masked_fill(~(known & known.unsqueeze(1)), float("inf"))
        return squared.sqrt().fill_diagonal_(0.0)


AnySimilarity = Similarity | BlockSimilarity
"""The types that hold distances between clients. `BlockSimilarity` is for clients that lack some blocks."""


def sketched(vectors_NP: Tensor, size: int, key: int) -> Tensor:
    """Count sketch (N, size): adds every entry, with a random sign, to one random bucket (Charikar et al., 2002).

    The sketch preserves inner products in expectation, and therefore also squared distances. The relative error falls
    as 1/sqrt(size).
    """
    bucket, sign = _places(vectors_NP.shape[1], size, key)
    return torch.zeros(len(vectors_NP), size).index_add_(1, bucket, vectors_NP * sign)


@lru_cache(maxsize=4)
def _places(width: int, size: int, key: int) -> tuple[Tensor, Tensor]:
    """Draw, for each of `width` entries of a vector, its bucket and its sign in the sketch.

    The result is cached, because each round of a run needs it.
    """
    bucket = keys.bits(keys.fold_in(key, 0), width).to(torch.int64).remainder_(size)
    return bucket, 1.0 - 2.0 * (keys.bits(keys.fold_in(key, 1), width) & 1)


class Cover:
    """The facility-location cost of a set of clients, to which clients are added one by one.

    Args:
        distance: D (N, N), symmetric.
        known: which clients have a vector, bool (N,). Other clients are neither candidates nor part of the cost.
    """

    def __init__(self, distance: Tensor, known: Tensor) -> None:
        self.distance, self.known = distance, known
        self.nearest = torch.where(known, float("inf"), 0.0)

    def costs(self, candidates: Sequence[int]) -> Tensor:
        """The cost of the choice with each candidate added, float64 (S,); +inf for unknown candidates."""
        index = torch.tensor(candidates, dtype=torch.int64)
        parts = [
            torch.minimum(self.nearest, self.distance[i]).sum(1, dtype=torch.float64) for i in torch.split(index, 64)
        ]
        return torch.cat(parts).masked_fill(~self.known[index], float("inf"))

    def best(self, candidates: Sequence[int]) -> int | None:
        """Return the candidate with the smallest cost (the first of several equal ones); None if no candidate is known.

        Args:
            candidates: clients in ascending order.
        """
        if not candidates:
            return None
        costs = self.costs(candidates)
        place = int(costs.argmin())
        return candidates[place] if bool(torch.isfinite(costs[place])) else None

    def add(self, client: int) -> None:
        """Add a client to the choice."""
        if bool(self.known[client]):
            self.nearest = torch.minimum(self.nearest, self.distance[client])


def cost(similarity: Similarity, chosen: Sequence[int]) -> float:
    """The cost G of a choice; +inf for an empty choice."""
    cover = Cover(similarity.distance, similarity.known)
    for client in chosen:
        cover.add(client)
    return float(cover.nearest.sum(dtype=torch.float64))


def sample(pool: Sequence[int], size: int, key: int) -> list[int]:
    """Draw `size` random members of the pool, ascending, or the whole pool if it has fewer members."""
    if len(pool) <= size:
        return sorted(pool)
    return sorted(pool[i] for i in keys.permutation(key, len(pool))[:size].tolist())


def sample_size(size: int, num: int) -> int:
    """Return the number of candidates in a pass of `stochastic_greedy`: max(b, floor(N / 10)), as in CMSFed's code.

    Args:
        size: b, the size of the choice.
        num: N, the number of clients.
    """
    return max(size, num // 10)


def greedy(similarity: Similarity, size: int, pool: Sequence[int]) -> list[int]:
    """Choose `size` members of the pool: in each pass the best of all candidates. Return them in order of choice."""
    return _passes(similarity, size, pool, lambda rest, _: rest)


def stochastic_greedy(similarity: Similarity, size: int, pool: Sequence[int], *, of: int, key: int) -> list[int]:
    """Choose `size` members of the pool. In each pass, draw a random sample of candidates and take the best one.

    Args:
        similarity: the clients' vectors and their distances.
        size: number of clients to choose.
        pool: the clients from which to choose.
        of: number of candidates in the sample of a pass.
        key: the key of the random samples.
    """
    return _passes(similarity, size, pool, lambda rest, step: sample(rest, of, keys.key(key, step)))


def lazy_greedy(similarity: Similarity, size: int, pool: Sequence[int]) -> list[int]:
    """Return the same choice as `greedy`, but evaluate fewer candidates.

    Each candidate has a gain from an earlier pass. It is an upper bound for the candidate's current gain, because gains
    never increase.
    """
    cover = Cover(similarity.distance, similarity.known)
    known = similarity.known.tolist()
    able = [client for client in sorted(pool) if known[client]]
    chosen = [_take(cover, cover.best(able))] if able and size else []
    current = float(cover.nearest.sum(dtype=torch.float64))
    rest = [client for client in able if client not in chosen]
    bounds = list(zip((cover.costs(rest) - current).tolist(), rest, strict=True)) if rest else []
    heapq.heapify(bounds)
    while bounds and len(chosen) < size:
        _, client = heapq.heappop(bounds)
        after = float(cover.costs([client])[0])
        if bounds and (after - current, client) > bounds[0]:
            heapq.heappush(bounds, (after - current, client))
            continue
        chosen.append(_take(cover, client))
        current = after
    unknown = [client for client in sorted(pool) if not known[client]]
    return chosen + unknown[: size - len(chosen)]


def _passes(
    similarity: Similarity, size: int, pool: Sequence[int], look: Callable[[list[int], int], list[int]]
) -> list[int]:
    cover = Cover(similarity.distance, similarity.known)
    rest, chosen, known = sorted(pool), list[int](), similarity.known.tolist()
    while rest and len(chosen) < size:
        candidates = look([client for client in rest if known[client]] or rest, len(chosen))
        best = cover.best(candidates)
        # if no remaining client has a vector, take the first candidate
        chosen.append(_take(cover, candidates[0] if best is None else best))
        rest.remove(chosen[-1])
    return chosen


def _take(cover: Cover, client: int | None) -> int:
    assert client is not None
    cover.add(client)
    return client
