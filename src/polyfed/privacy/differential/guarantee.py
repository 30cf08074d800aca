"""The guarantee of a run: epsilon in total, and for each block and kind, before the run and after every round."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polyfed.privacy.differential.accounting import Accounting
from polyfed.privacy.differential.mechanism import Mechanism
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.announcement import Announced

PROTECTED, UNPROTECTED, WITHHELD = "protected", "unprotected", "withheld"
"""The states that a part of a reply can have. Clients fill a withheld part with zeros."""


@dataclass(frozen=True)
class Guarantee:
    """The differential privacy that a run guarantees for one client or one row.

    Attributes:
        spec: the section [privacy].
        accounting: the facts about the run that the accountant needs.
        mechanism: clip norm and noise.
        parts: every part of a reply that depends on data, with `PROTECTED`, `UNPROTECTED` or `WITHHELD`.
        rounds: number of rounds that the run will do.
        wanted: number of rounds that the recipe asks for.
        not_covered: data that depends on the rows and that epsilon does not cover, in words.
        noise_norm: the noise that one round adds to the mean of the updates: its norm, divided by the clip norm. None
            if the server adds no noise and the clients add none to their updates, or if the number is not known.
    """

    spec: Privacy
    accounting: Accounting
    mechanism: Mechanism
    parts: Sequence[tuple[Announced, str]]
    rounds: int
    wanted: int
    not_covered: tuple[str, ...] = ()
    noise_norm: float | None = None

    @property
    def resolved(self) -> Privacy:
        """The section, with the noise multiplier that was found. A resumed run must have the same section."""
        return replace(self.spec, noise_multiplier=self.mechanism.noise_multiplier)

    @property
    def unprotected(self) -> list[Announced]:
        """The parts of replies that clients send without protection."""
        return [part for part, state in self.parts if state == UNPROTECTED]

    def epsilon(self, rounds: int, block: str | None = None) -> float:
        """Return the epsilon of this number of rounds, in total or on one block of the model.

        With `unit = "client"` and one round, the epsilon of a block can be smaller than the total. From the second
        round on, the update of a block depends on what all other blocks have already revealed. Only the total is then
        valid, and the method returns the total for every block. With `unit = "example"`, every training step adds
        noise. From the second step on, the gradients of a block depend on what the first step has revealed about all
        blocks, so the method always returns the total.
        """
        clip = self.mechanism.clip
        alone = self.spec.unit == "client" and rounds * self.accounting.uses <= 1
        relative = clip.limit(block) / clip.total if alone and block is not None else 1.0
        return self.accounting.epsilon(self.mechanism.noise_multiplier / relative, rounds)

    def by_block(self, rounds: int) -> dict[str, dict[str, float | None]]:
        """Return block -> kind of data -> epsilon of these rounds, or None for data that clients send unprotected."""
        result: dict[str, dict[str, float | None]] = {}
        for part, state in self.parts:
            kinds = result.setdefault(part.block, {})
            if state == UNPROTECTED:
                kinds[part.kind] = None
            elif state == PROTECTED and part.kind not in kinds:
                kinds[part.kind] = self.epsilon(rounds, part.block)
        return {block: kinds for block, kinds in result.items() if kinds}

    def after(self, rounds: int) -> dict[str, Any]:
        """Return the epsilon that these rounds have spent, for a line of rounds.jsonl."""
        return {"epsilon": self.epsilon(rounds), "blocks": self.by_block(rounds)}

    def facts(self, rounds: int) -> dict[str, Any]:
        """Return the object `privacy` of result.json: epsilon, how it was counted, and what was sent unprotected."""
        spec = self.spec
        return {
            "unit": spec.unit,
            "noise_at": "server" if spec.central else "client",
            "delta": spec.delta,
            "budget": spec.epsilon,
            "noise_multiplier": self.mechanism.noise_multiplier,
            "clip_norm": spec.clip_norm,
            "clip": spec.clip,
            **self._adaptive,
            "accountant": spec.accountant,
            "neighbours": self.neighbours,
            "assumption": self.assumption,
            "rounds": rounds,
            "stopped": self.stop_note,
            **self.after(rounds),
            "unprotected": [
                dict(zip(("message", "field", "kind", "block"), part, strict=True))
                for part in dict.fromkeys((p.message, p.field, p.kind, p.block) for p in self.unprotected)
            ],
            "not_covered": [*self.not_covered],
            "noise_norm": self.noise_norm,
            "simulated": not self.mechanism.secure,
        }

    @property
    def _adaptive(self) -> dict[str, float]:
        """The entries `update_noise` and `count_noise`; empty without adaptive clipping.

        Adaptive clipping also needs a count: the number of updates whose norm is below the clip norm. The noise in the
        updates and the noise in this count share the epsilon of the run.
        """
        rule = self.mechanism.adaptive
        return {} if rule is None else {"update_noise": self.mechanism.update_noise, "count_noise": rule.count_noise}

    @property
    def neighbours(self) -> str:
        """How two neighbouring data sets differ. The guarantee makes it hard to tell which of the two a run used."""
        what = "the data of one client" if self.spec.unit == "client" else "one row"
        return f"{what} is {'replaced by other data' if self.accounting.swing == 2 else 'left out'}"

    @property
    def protects(self) -> str:
        """What nobody can tell for certain from the result of the run, such as "whether one row was used at all"."""
        swing = self.accounting.swing == 2
        if self.spec.unit == "client":
            return "which data one client used" if swing else "whether one client's data was used at all"
        return "the values of one row" if swing else "whether one row was used at all"

    @property
    def assumption(self) -> str:
        """What the guarantee assumes about sampling and about clients, in sentences without the last full stop."""
        trust = ". The server reads only sums, so the guarantee assumes that every client clips its own update"
        return self._sampling + (trust if self.mechanism.central and any(part.masked for part, _ in self.parts) else "")

    @property
    def _sampling(self) -> str:
        """How the accountant counts the sampling of clients and rows, as a sentence without a full stop."""
        if self.accounting.cohort is not None:
            size, total = self.accounting.cohort
            return (
                f"Counted for a server that draws {size} of {total} clients in every round, without replacement, and "
                "keeps the cohort secret"
            )
        if self.spec.unit == "client":
            return "Counted as if every client took part in every round, which is a safe upper bound"
        return (
            f"Counted with each row in one batch of each epoch, and {self.accounting.uses} "
            f"{'epoch' if self.accounting.uses == 1 else 'epochs'} in a round. Batches are shuffled and no Poisson "
            "samples, so no amplification by sampling is counted"
        )

    @property
    def stop_note(self) -> str:
        """The reason why the run stops before its last round, as a sentence; empty if it does not stop early."""
        if self.rounds == self.wanted or self.spec.epsilon is None:
            return ""
        more = self.epsilon(self.rounds + 1)
        return (
            f"The run stops after round {self.rounds} of {self.wanted}, because its privacy budget is spent: one more "
            f"round would raise epsilon to {number(more)}, and [privacy] epsilon = {self.spec.epsilon:g}"
        )

    def sentences(self) -> list[str]:
        """Return the guarantee in sentences, for `polyfed check` and for the start of a run."""
        spec = self.spec
        what = "one client" if spec.unit == "client" else "one row"
        times = f"{self.rounds} {'round' if self.rounds == 1 else 'rounds'}"
        head = (
            f"Privacy of {what}: epsilon {number(self.epsilon(self.rounds))} at delta {spec.delta:g} after {times} "
            f"(noise multiplier {self.mechanism.noise_multiplier:g}, clip norm {spec.clip_norm:g}, clip {spec.clip}, "
            f"accountant {spec.accountant})"
        )
        result = [head, f"Protects: {self.protects}. {self.assumption}", self.stop_note]
        if rule := self.mechanism.adaptive:
            result.append(
                f"Adaptive clipping: the clip norm starts at {spec.clip_norm:g} and follows the {rule.quantile:g} "
                "quantile of the norms of the updates. The updates have noise multiplier "
                f"{self.mechanism.update_noise:.4f}, and the number of updates below the clip norm has noise with "
                f"standard deviation {rule.count_noise:g}"
            )
        if self.noise_norm is not None:
            result.append(
                f"Noise: in the mean of a round, the norm of the noise is about {self.noise_norm:.3g} times clip_norm. "
                "The norm of the mean update is at most clip_norm, so the model learns less if this number is larger"
            )
        if self.not_covered:
            result.append(f"Epsilon does not cover: {'; '.join(self.not_covered)}")
        if not self.mechanism.secure:
            result.append(
                "A simulation draws the noise from the seed of the run. It measures the accuracy and protects nobody. "
                "In a deployment, devices and the server draw the noise from the operating system"
            )
        if names := in_words([part for part, state in self.parts if state == WITHHELD]):
            result.append(f"Withheld, so clients send zeros: {names}")
        if names := in_words(self.unprotected):
            result.append(
                f"NOT PROTECTED: {names}. Epsilon bounds only what the protected parts reveal in addition to these "
                "parts, and is no guarantee for the whole run"
            )
        return [text for text in result if text]


def number(epsilon: float) -> str:
    """Return an epsilon as text. It is rounded up, so that the text never states a smaller epsilon than the real one.

    The text has three decimals, or six for an epsilon below 0.01.

    >>> number(1.23401), number(0.0), number(0.0000999)
    ('1.235', '0', '0.0001')
    """
    scale = 1000 if epsilon >= 0.01 else 1_000_000
    return f"{math.ceil(round(epsilon * scale, 6)) / scale:g}" if math.isfinite(epsilon) else "infinity"


def in_words(parts: Sequence[Announced]) -> str:
    """List fields with their kind and their blocks, as `Update.loss (statistic of shared)`."""
    result: dict[tuple[str, str, str], list[str]] = {}
    for part in parts:
        blocks = result.setdefault((part.message, part.field, part.kind), [])
        if part.block not in blocks:
            blocks.append(part.block)
    return ", ".join(f"{m}.{f} ({kind} of {', '.join(blocks)})" for (m, f, kind), blocks in result.items())


def states_of(parts: Mapping[tuple[str, str, str], Announced], mechanism: Mechanism) -> list[tuple[Announced, str]]:
    """Return every part of a reply that depends on data, with `PROTECTED`, `UNPROTECTED` or `WITHHELD`."""
    result = []
    for part in parts.values():
        if part.random:
            continue
        state = UNPROTECTED
        if part.field in mechanism.protected.get(part.task, ()):
            state = PROTECTED
        elif part.field in mechanism.withheld.get(part.task, ()):
            state = WITHHELD
        result.append((part, state))
    return result
