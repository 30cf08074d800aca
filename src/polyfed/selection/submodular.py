"""Facility location over clients: choose few whose vectors stand for all.

With distances D the cost of a choice S is G(S) = sum over clients v of the smallest D[v, i], i in S; the utility
constant - G is monotone and submodular, so greedy choices are within 1 - 1/e of the best (Nemhauser, Wolsey, Fisher,
1978). Three ways to be greedy: full; lazy, which gives the same choice from fewer evaluations (Minoux, 1978); and
stochastic, which looks at a random sample of the candidates in each pass (Mirzasoleiman et al., AAAI 2015). DivFL
(Balakrishnan et al., ICLR 2022) chooses on one D, CMSFed on two at once (algorithms.md 2.3, 5.7).

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
    """What is remembered of every client: a vector, and the distances between them.

    Attributes:
        vectors: (N, P) float32, or (N, `sketch`) after projection.
        known: whether a client has ever given a vector, bool (N,).
        distance: Euclidean, (N, N) float32, symmetric, zero diagonal; +inf to and from clients that are not known.
        sketch: entries of a sketched vector; 0 keeps vectors whole.
        key: of the sketch.
    """

    vectors: Tensor
    known: Tensor
    distance: Tensor
    sketch: int = 0
    key: int = 0

    def __post_init__(self) -> None:
        """Greedy choices look distances up one by one, which an accelerator is slow at."""
        keep_on_host(self, "vectors", "known", "distance")

    @classmethod
    def empty(cls, num: int, size: int, sketch: int = 0, key: int = 0) -> "Similarity":
        """Nobody known yet; vectors will have `size` entries.

        A vector shorter than the sketch is kept whole: there is nothing to save.
        """
        sketch = sketch if sketch < size else 0
        distance = torch.full((num, num), float("inf")).fill_diagonal_(0.0)
        return cls(torch.zeros(num, sketch or size), torch.zeros(num, dtype=torch.bool), distance, sketch, key)

    def refreshed(self, fresh: Mapping[int, Tensor]) -> "Similarity":
        """With the vectors (P,) of some clients replaced, and only the rows and columns of these recomputed.

        This is DivFL's "no-overheads" update: everything between other clients stays as it was, however old.
        """
        if not fresh:
            return self
        changed = torch.tensor(sorted(fresh))
        rows = torch.stack([fresh[int(client)].to("cpu", torch.float32) for client in changed])
        vectors, known, distance = self.vectors.clone(), self.known.clone(), self.distance.clone()
        vectors[changed] = sketched(rows, self.sketch, self.key) if self.sketch else rows
        known[changed] = True
        # direct differences: the shortcut through dot products leaves equal vectors at a distance above zero
        fresh_rows = torch.cdist(vectors[changed], vectors, compute_mode="donot_use_mm_for_euclid_dist")
        fresh_rows[:, ~known] = float("inf")
        distance[changed] = fresh_rows
        distance[:, changed] = fresh_rows.T
        return replace(self, vectors=vectors, known=known, distance=distance)


def sketched(vectors_NP: Tensor, size: int, key: int) -> Tensor:
    """Count sketch (N, size): every entry is added, with a random sign, to one random bucket (Charikar et al., 2002).

    Inner products and so squared distances are kept in expectation; their relative error falls as 1/sqrt(size).
    """
    bucket, sign = _places(vectors_NP.shape[1], size, key)
    return torch.zeros(len(vectors_NP), size).index_add_(1, bucket, vectors_NP * sign)


@lru_cache(maxsize=4)
def _places(width: int, size: int, key: int) -> tuple[Tensor, Tensor]:
    """Bucket and sign of every entry: a pure function of the key, kept because a run asks every round."""
    bucket = keys.bits(keys.fold_in(key, 0), width).to(torch.int64).remainder_(size)
    return bucket, 1.0 - 2.0 * (keys.bits(keys.fold_in(key, 1), width) & 1)


class Cover:
    """One facility-location problem while a choice is being made.

    Args:
        distance: D (N, N), symmetric.
        known: who takes part; the others neither stand for anybody nor want to be stood for.
    """

    def __init__(self, distance: Tensor, known: Tensor) -> None:
        self.distance, self.known = distance, known
        self.nearest = torch.where(known, float("inf"), 0.0)

    def costs(self, candidates: Sequence[int]) -> Tensor:
        """G(S and the candidate) for each candidate, float64 (S,); +inf for those not known."""
        index = torch.tensor(candidates, dtype=torch.int64)
        # sums in double precision: ties between candidates then stay ties, whatever the order of the sum; a few
        # candidates at a time: their rows then stay in the cache
        parts = [
            torch.minimum(self.nearest, self.distance[i]).sum(1, dtype=torch.float64) for i in torch.split(index, 64)
        ]
        return torch.cat(parts).masked_fill(~self.known[index], float("inf"))

    def best(self, candidates: Sequence[int]) -> int | None:
        """The candidate (ascending) that leaves the smallest cost, the first among equals; None if none is known."""
        if not candidates:
            return None
        costs = self.costs(candidates)
        place = int(costs.argmin())
        return candidates[place] if bool(torch.isfinite(costs[place])) else None

    def add(self, client: int) -> None:
        """Let a client join the choice."""
        if bool(self.known[client]):
            self.nearest = torch.minimum(self.nearest, self.distance[client])


def cost(similarity: Similarity, chosen: Sequence[int]) -> float:
    """G of a choice; +inf for the empty one."""
    cover = Cover(similarity.distance, similarity.known)
    for client in chosen:
        cover.add(client)
    return float(cover.nearest.sum(dtype=torch.float64))


def sample(pool: Sequence[int], size: int, key: int) -> list[int]:
    """`size` random members of the pool, ascending; all of it when it has no more."""
    if len(pool) <= size:
        return sorted(pool)
    return sorted(pool[i] for i in keys.permutation(key, len(pool))[:size].tolist())


def sample_size(size: int, num: int) -> int:
    """Candidates of a pass of the stochastic greedy: max(b, floor(N / 10)) (CMSFed's code, algorithms.md 2.4)."""
    return max(size, num // 10)


def greedy(similarity: Similarity, size: int, pool: Sequence[int]) -> list[int]:
    """Full greedy: in every pass the best of all candidates; `size` members of the pool, in order of choice."""
    return _passes(similarity, size, pool, lambda rest, _: rest)


def stochastic_greedy(similarity: Similarity, size: int, pool: Sequence[int], *, of: int, key: int) -> list[int]:
    """In every pass the best of `of` random candidates, drawn from the stream (key, pass)."""
    return _passes(similarity, size, pool, lambda rest, step: sample(rest, of, keys.key(key, step)))


def lazy_greedy(similarity: Similarity, size: int, pool: Sequence[int]) -> list[int]:
    """The choice of `greedy` from fewer evaluations: a gain can only fall, so an old one is an upper bound."""
    cover = Cover(similarity.distance, similarity.known)
    able = [client for client in sorted(pool) if bool(similarity.known[client])]
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
    unknown = [client for client in sorted(pool) if client not in able]
    return chosen + unknown[: size - len(chosen)]


def _passes(
    similarity: Similarity, size: int, pool: Sequence[int], look: Callable[[list[int], int], list[int]]
) -> list[int]:
    cover = Cover(similarity.distance, similarity.known)
    rest, chosen = sorted(pool), list[int]()
    while rest and len(chosen) < size:
        candidates = look(rest, len(chosen))
        best = cover.best(candidates)
        # nobody there has ever given a vector: the first will do
        chosen.append(_take(cover, candidates[0] if best is None else best))
        rest.remove(chosen[-1])
    return chosen


def _take(cover: Cover, client: int | None) -> int:
    assert client is not None
    cover.add(client)
    return client
