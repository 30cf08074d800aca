"""The choice of clients and modalities in a round of CMSFed, by solving two facility-location problems together.

`cmsfed.py` builds a `SelectionProblem` from the server's knowledge and calls `solve` (Algorithm 1, Eq. 13-14).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from polyfed.algorithms.cmsfed.weak_modality import ImbalanceRatios
from polyfed.core import keys
from polyfed.core.tree import SHARED
from polyfed.federation.client_registry import ClientRegistry
from polyfed.selection.submodular import AnySimilarity, Cover, Similarity, sample


@dataclass(frozen=True)
class Choice:
    """The selected clients of a round.

    Attributes:
        weak: the weak modality; empty if there is none.
        train_all: S_M, clients that train all modalities, in the order in which they were chosen.
        train_alone: for each client that trains only one modality, this modality. The clients that train the weak
            modality form the set S_w. The other clients in `train_alone` do not own the weak modality.
    """

    weak: str = ""
    train_all: list[int] = field(default_factory=list)
    train_alone: dict[int, str] = field(default_factory=dict)

    @property
    def train_weak(self) -> list[int]:
        """S_w: clients that train only the weak modality."""
        return [client for client, trained in self.train_alone.items() if trained == self.weak]

    def trained(self, modalities: Sequence[str]) -> dict[str, int]:
        """Return, for each modality and for the shared block, how many selected clients train it.

        A block that no selected client trains is left out.
        """
        counts = dict.fromkeys([*modalities, SHARED], len(self.train_all))
        for modality in self.train_alone.values():
            counts[modality] += 1
            counts[SHARED] += 1
        return {block: count for block, count in counts.items() if count}

    def shares(self, modalities: Sequence[str]) -> dict[str, float]:
        """Return, for each modality, the share of the selected clients that train it.

        Selected clients count even if they do not reply. A modality that no selected client trains is left out.
        """
        return {m: count / len(self.picked) for m, count in self.trained(modalities).items() if m != SHARED}

    @property
    def picked(self) -> set[int]:
        """All selected clients."""
        return {*self.train_all, *self.train_alone}

    def share(self, modality: str, num_modalities: int) -> float:
        """Return the modality's share of all selected (client, modality) pairs (Fig. 6)."""
        own = len(self.train_all) + sum(trained == modality for trained in self.train_alone.values())
        return own / max(num_modalities * len(self.train_all) + len(self.train_alone), 1)


@dataclass(frozen=True)
class SelectionProblem:
    """The two problems of a round: G_1 over the gradients g, and G_2 over the gradients h of the weak encoder.

    Attributes:
        gradients: the clients' vectors g and their distances D_1.
        encoder: the vectors h of the weak modality and their distances D_2; None if no modality is weak.
        ratios: imbalance ratios of the clients.
        weak: the weak modality, or empty.
        dominance_threshold: chi. A candidate k2 with a dominance ratio above chi trains only the weak modality.
        resolution: the rule, `paper` or `authors`, that decides which of the candidates k1 and k2 are selected; see
            `CmsFed`.
        size: b, the number of clients to choose.
        sample: s, the number of candidates in a pass.
        at_random: whether to draw k1 and k2 at random from the candidates, as a control.
    """

    gradients: AnySimilarity
    encoder: Similarity | None
    ratios: ImbalanceRatios
    weak: str
    dominance_threshold: float
    resolution: Literal["paper", "authors"]
    size: int
    sample: int
    at_random: bool = False

    def solve(self, clients: ClientRegistry, key: int) -> Choice:
        """Select clients in passes. Each pass finds the best candidate for G_1 and for G_2 before it selects a client.

        Args:
            clients: the client registry.
            key: random key of the round. Pass p draws its candidates from (key, p).
        """
        first = Cover(self.gradients.distance, self.gradients.known)
        second = Cover(self.encoder.distance, self.encoder.known) if self.encoder else None
        choice, pool, passes = Choice(self.weak), list(clients.eligible), 0
        known = self.gradients.known.tolist()
        while pool and len(choice.picked) < self.size:
            able = [client for client in pool if known[client]] or pool  # clients without a vector are chosen last
            candidates = sample(able, self.sample, keys.key(key, passes))
            k1 = self._best(first, candidates, keys.key(key, passes, "k1"))
            k2 = self._best(second, candidates, keys.key(key, passes, "k2")) if second else None
            for client, alone in self._resolve(k1, k2, candidates):
                if len(choice.picked) == self.size:
                    break
                if alone:
                    choice.train_alone[client] = self._trained_by(clients.owned(client))
                else:
                    choice.train_all.append(client)
                pool.remove(client)
                self._absorb(client, alone, first, second)
            passes += 1
        return choice

    def _best(self, cover: Cover, candidates: Sequence[int], key: int) -> int | None:
        """Return the candidate with the smallest cost, or None if no candidate has ever sent a gradient.

        If `at_random` is set, return a random candidate that has sent a gradient.
        """
        if not self.at_random:
            return cover.best(candidates)
        able = [client for client in candidates if bool(cover.known[client])]
        return able[keys.choice(key, len(able), 1)[0]] if able else None

    def _resolve(self, k1: int | None, k2: int | None, candidates: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """Yield the clients that one pass selects, and for each whether it trains only one modality (Eq. 13, 14)."""
        k2_alone = k2 is not None and (
            not self._complete(k2) or self.ratios.dominance(self.weak, k2) > self.dominance_threshold
        )
        if k1 is None and k2 is None:  # no candidate has ever sent a gradient
            yield candidates[0], not self._complete(candidates[0])
        elif self.resolution == "authors" and k2 is not None and (k2_alone or k1 is None):
            yield k2, k2_alone
        else:
            if k1 is not None:
                yield k1, not self._complete(k1)
            if k2 is not None and k2 != k1 and (self.resolution == "paper" or k1 is None):
                yield k2, k2_alone

    def _absorb(self, client: int, alone: bool, first: Cover, second: Cover | None) -> None:
        """Add a newly selected client to the selected clients of the problems G_1 and G_2.

        A client that owns all modalities but trains only one is not added to G_1. A client that trains all modalities
        is not added to G_2 if `resolution` is "authors", as in the released code.
        """
        if not alone or not self._complete(client):  # its gradient covers all that it owns
            first.add(client)
        if second is not None and (alone or self.resolution == "paper"):
            second.add(client)

    def _trained_by(self, owned: Sequence[str]) -> str:
        """Return the modality that a client trains if it trains only one."""
        return self.weak if self.weak in owned else self.ratios.weakest_of(owned)

    def _complete(self, client: int) -> bool:
        return bool(self.ratios.complete[client])


def without_gradients(weak: str, cohort: Sequence[int], ratios: ImbalanceRatios, clients: ClientRegistry) -> Choice:
    """Return the choice of a round in which a selector drew the cohort, without comparing the clients' gradients.

    A client that owns all modalities trains all of them. A client that lacks a modality trains only its weakest one.
    """
    complete = [client for client in cohort if bool(ratios.complete[client])]
    rest = [client for client in cohort if client not in complete]
    return Choice(weak, complete, {client: ratios.weakest_of(clients.owned(client)) for client in rest})


def all_alike(similarity: AnySimilarity) -> bool:
    """Whether all known vectors are equal, so that every choice represents the clients equally well."""
    known = similarity.distance[similarity.distance.isfinite()]
    return len(similarity.distance) > 1 and not bool((known > 0).any())


def logged(choice: Choice, ratios: ImbalanceRatios) -> dict[str, float]:
    """Return the numbers that the log shows for a round.

    `imbalance_ratio` is the global ratio of the first modality over the second. If there are more than two modalities,
    it is the ratio of the strongest over the weakest. `share.<modality>` is each modality's share of the selected
    (client, modality) pairs. `picked.all` is |S_M|, the number of clients that train all modalities. `picked.weak` is
    |S_w|, the number of clients that train only the weak modality. S_w may include clients that own no other modality.
    `picked.by_ratio` is the number of clients in S_w that own all modalities. These clients are in S_w because of the
    ratio rule. `picked.alone` is the number of clients that train only one modality, weak or not.
    """
    mean = ratios.mean()
    shares = {f"share.{m}": choice.share(m, len(ratios.modalities)) for m in ratios.modalities}
    ratio = {"imbalance_ratio": mean[ratios.modalities[-1]]} if len(mean) == 2 else {}
    if len(mean) > 2:
        ratio = {"imbalance_ratio": max(mean.values()) / min(mean.values())}
    picked = {"picked.all": float(len(choice.train_all)), "picked.alone": float(len(choice.train_alone))}
    picked["picked.weak"] = float(len(choice.train_weak))
    picked["picked.by_ratio"] = float(sum(bool(ratios.complete[client]) for client in choice.train_weak))
    return ratio | shares | picked
