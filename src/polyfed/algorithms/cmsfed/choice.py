"""Who trains what in a round of CMSFed: two facility-location problems solved together.

See `cmsfed.py` for the paper; section numbers are those of algorithms.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from polyfed.algorithms.cmsfed.memory import Ratios
from polyfed.core import keys
from polyfed.federation.federation import Federation
from polyfed.selection.submodular import Cover, Similarity, sample, sample_size

if TYPE_CHECKING:
    from polyfed.algorithms.cmsfed.cmsfed import CmsFed, CmsFedState


@dataclass(frozen=True)
class Choice:
    """Who was picked with what.

    Attributes:
        weak: the weak modality; empty when there is none.
        both: S_M, who trains all modalities, in order of choice.
        alone: who trains one modality, and which; S_w are those with the weak one.
    """

    weak: str = ""
    both: list[int] = field(default_factory=list)
    alone: dict[int, str] = field(default_factory=dict)

    @property
    def picked(self) -> set[int]:
        """All chosen clients."""
        return {*self.both, *self.alone}

    def share(self, modality: str, num_modalities: int) -> float:
        """The modality's share of all (client, modality) picks (7.1)."""
        mine = len(self.both) + sum(own == modality for own in self.alone.values())
        return mine / max(num_modalities * len(self.both) + len(self.alone), 1)


@dataclass(frozen=True)
class Problem:
    """What a choice needs to know.

    Attributes:
        gradients: D1.
        encoder: D2 of the weak modality; None when there is none.
        ratios: imbalance ratios.
        weak: the weak modality, or empty.
        chi: see `CmsFed`.
        resolution: see `CmsFed`.
        size: b, clients to choose.
        sample: s, candidates looked at in a pass.
    """

    gradients: Similarity
    encoder: Similarity | None
    ratios: Ratios
    weak: str
    chi: float
    resolution: Literal["paper", "authors"]
    size: int
    sample: int

    def solve(self, fed: Federation) -> Choice:
        """Algorithm 1's selection (2.4): both problems look at the same candidates before either moves."""
        first = Cover(self.gradients.distance, self.gradients.known)
        second = Cover(self.encoder.distance, self.encoder.known) if self.encoder else None
        choice, pool, passes = Choice(self.weak), list(fed.clients.eligible), 0
        key = keys.key(fed.seed, "greedy", fed.round)
        while pool and len(choice.picked) < self.size:
            candidates = sample(pool, self.sample, keys.key(key, passes))
            k1, k2 = first.best(candidates), second.best(candidates) if second else None
            for client, alone in self.resolve(k1, k2, candidates):
                if len(choice.picked) == self.size:
                    break
                self._join(choice, client, alone, fed)
                pool.remove(client)
                self._absorb(client, alone, first, second)
            passes += 1
        return choice

    def resolve(self, k1: int | None, k2: int | None, candidates: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Who joins in this pass, and whether it trains alone: Eq. 13 decides for k1, Eq. 14 for k2."""
        dominant = k2 is not None and (not self._complete(k2) or self.ratios.dominance(self.weak, k2) > self.chi)
        if k1 is None and k2 is None:  # nobody here has ever given a gradient
            yield candidates[0], not self._complete(candidates[0])
        elif self.resolution == "authors" and k2 is not None and (dominant or k1 is None):
            yield k2, dominant
        else:
            if k1 is not None:
                yield k1, False
            if k2 is not None and k2 != k1 and (self.resolution == "paper" or k1 is None):
                yield k2, dominant

    def _absorb(self, client: int, alone: bool, first: Cover, second: Cover | None) -> None:
        """The released code keeps the problems apart: each knows only its own picks."""
        apart = self.resolution == "authors"
        if not alone:
            first.add(client)
        if second is not None and (alone or not apart):
            second.add(client)

    def _join(self, choice: Choice, client: int, alone: bool, fed: Federation) -> None:
        if not alone:
            choice.both.append(client)
            return
        owned = fed.clients.owned(client)
        choice.alone[client] = self.weak if self.weak in owned else self.ratios.weakest_of(owned)

    def _complete(self, client: int) -> bool:
        return bool(self.ratios.complete[client])


def choose(method: "CmsFed", state: "CmsFedState", weak: str, fed: Federation) -> Choice:
    """The choice of a round."""
    assert state.gradients is not None, "the clients have not been explored"
    size = method.selector.size(fed)
    num = len(fed.clients)
    distances = state.gradients.distance
    if num > 1 and not bool((distances[distances.isfinite()] > 0).any()):
        fed.emit("note", text=f"round {fed.round}: all gradients are alike, so the lowest numbers are chosen")
    return Problem(
        gradients=state.gradients,
        encoder=state.encoders.get(weak),
        ratios=state.ratios,
        weak=weak,
        chi=method.chi,
        resolution=method.resolution,
        size=size,
        sample=num if method.greedy == "full" else sample_size(size, num),
    ).solve(fed)
