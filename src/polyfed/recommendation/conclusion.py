"""The conclusion of a recommendation: which method to take, and a paragraph in which every number is computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyfed.core.errors import counted
from polyfed.evaluation.client_statistics import mean_and_spread
from polyfed.recommendation.pilot import REFERENCE, Arm, keys_text
from polyfed.report.comparison.paired_tests import LEVEL, Paired, holm, paired, seeds_to_show
from polyfed.report.scores import Metric, interval_of

WANTED = 0.02
"""The difference for which the paragraph says how many more seeds would show it: two points, or 2 % of an error."""

FAR = 0.1
"""From this difference on, validation rows are called unlike the test rows (ours)."""

NAMED = 3
"""The most methods that a sentence names."""


@dataclass(frozen=True)
class Rival:
    """A method beside the chosen one.

    Attributes:
        name: the method.
        role: see `Arm`.
        test: the differences chosen minus rival, on the seeds that both have.
        p_holm: p after Holm's correction over all rivals of the chosen method, its placebo included.
        more_seeds: how many more seeds would show a difference of `WANTED`, with a power of 80 %. None if unknown.
        title: the name in a sentence; see `Arm.title`.
    """

    name: str
    role: str
    test: Paired
    p_holm: float | None
    more_seeds: int | None
    title: str

    @property
    def alike(self) -> bool:
        """Whether the test does not tell the two apart."""
        return self.p_holm is None or self.p_holm >= LEVEL


@dataclass(frozen=True)
class Gain:
    """What a modality adds: the score with it minus the score without it.

    Attributes:
        modality: the modality.
        beside: the other modalities that the clients have.
        test: the differences over the seeds.
    """

    modality: str
    beside: tuple[str, ...]
    test: Paired

    @property
    def shown(self) -> bool:
        """Whether the gain is above 0 at 5 %."""
        return self.test.p is not None and self.test.p < LEVEL and self.test.mean > 0


@dataclass(frozen=True)
class Conclusion:
    """The chosen method and what supports it.

    Attributes:
        choice: the chosen method.
        metric: the metric.
        rivals: the other methods with their tests, the references and the placebo included.
        gains: what each modality adds.
        floor: the clients alone, if this was run.
        ceiling: centralized training, if this was run.
        linear: a linear model on all rows in one place, if this was fitted.
        not_tried: name -> why, for methods that had no run.
        alone: subset of the modalities -> mean score of the chosen method from it, of single ones and of all.
        twins: methods with exactly FedAvg's scores, which no test compares again.
        best: the method with the best mean, if it is not the chosen one, because the two are alike.
        skipped: why the chosen method was not scored from every subset of the modalities; empty if it was.
        out_of_time: whether the time ended before all stages.
        minutes: the time.
    """

    choice: Arm
    metric: Metric
    rivals: tuple[Rival, ...]
    gains: tuple[Gain, ...] = ()
    floor: Arm | None = None
    ceiling: Arm | None = None
    linear: Arm | None = None
    not_tried: Mapping[str, str] | None = None
    best: Arm | None = None
    skipped: str = ""
    alone: Mapping[str, float] = field(default_factory=dict)
    twins: tuple[str, ...] = ()
    out_of_time: bool = False
    minutes: float = 0.0

    @property
    def compared(self) -> bool:
        """Whether any score supports the choice."""
        return bool(self.choice.scores) or self.choice.validation is not None

    @property
    def paragraph(self) -> str:
        """All sentences."""
        return " ".join(self.sentences())

    def sentences(self) -> Iterator[str]:
        """Yield the sentences of the paragraph."""
        yield self._choice()
        yield from self._misjudged()
        yield from self._bounds()
        yield from self._tie()
        if (base := self._rival("fedavg")) is not None:
            yield f"It is {self._apart(base)} FedAvg ({self._proof(base)})."
        if self.twins:
            yield f"{_listed(self.twins)} had exactly FedAvg's scores."
        if self.choice.near:
            yield self.choice.near
        yield from self._alike()
        yield from self._placebo()
        yield from self._modalities()
        yield from (f"{text[0].upper()}{text[1:]}." for text in self.choice.edges)
        yield from self._left_out()
        yield from self._other_rows()
        if self.out_of_time:
            yield f"{self.minutes:.3g} minutes were too few for all runs; the same command with more --minutes goes on."

    def _choice(self) -> str:
        given = [text for text in (self.choice.option, keys_text(self.choice.chosen)) if text]
        words = f" with {', '.join(given)}" if given else ""
        if not self.choice.scores:
            score = self.choice.validation
            known = "" if score is None else f"; on validation rows it had {self._number(score)}"
            hasty = "for now: the time was too short for runs on the reported seeds"
            return f"Take {self.choice.name}{words} {hasty}{known}."
        mean, spread = mean_and_spread(list(self.choice.scores.values()))
        n = len(self.choice.scores)
        around = f" ± {self._number(spread)} (standard deviation)" if n > 1 else ""
        text = f"Take {self.choice.name}{words}: {self.metric.title} is {self._number(mean)}{around} over {_seeds(n)}"
        ends = []
        if self.floor is not None and self.floor.scores:
            whose = "" if self.metric.name.startswith("personal") else " (scored on the rows of all)"
            ends.append(f"{self._number(self.floor.mean)} where every client trains alone{whose}")
        if self.ceiling is not None and self.ceiling.scores:
            ends.append(f"{self._number(self.ceiling.mean)} where the server has all rows")
        if self.linear is not None:
            ends.append(f"{self._number(self.linear.mean)} by a linear model on all rows in one place")
        return f"{text}, against {_listed(ends)}." if ends else f"{text}."

    def _misjudged(self) -> Iterator[str]:
        """Yield that settings were chosen on rows that are unlike the test rows."""
        score = self.choice.validation
        if score is None or not self.choice.scores or not self.metric.share:
            return
        if abs(score - self.choice.mean) >= FAR:
            yield (
                f"On the validation rows it has {self._number(score)}: they are unlike the test rows, so the settings "
                "that they chose may be far from the best, for every method."
            )

    def _bounds(self) -> Iterator[str]:
        """Yield whether centralized training is worse, and whether the linear model is better.

        The latter says that the model or its training can be improved.
        """
        if not self.choice.scores:
            return
        sign = -1 if self.metric.lowest else 1
        if self.ceiling is not None and self.ceiling.scores:
            found = paired(differences(self.choice.scores, self.ceiling.scores))
            if sign * found.mean > 0:
                yield (
                    f"Training on all rows at the server is {self._size(abs(found.mean))} worse (n = {found.n}, p "
                    f"{_p(found.p)}), with settings from as many trials: it is a reference, which a method can exceed."
                )
        if self.linear is None:
            return
        gap = self.linear.mean - self.choice.mean
        if sign * gap > 0:
            yield (
                f"The linear model is {self._size(abs(gap))} better, so another model, more rounds or another "
                "learning rate may help more than another method."
            )

    def _tie(self) -> Iterator[str]:
        """Yield why the method with the best mean is not the chosen one."""
        rival = None if self.best is None else self._rival(self.best.name)
        if rival is not None:
            lead = "has the same mean" if not rival.test.mean else f"is {self._size(abs(rival.test.mean))} better"
            cheaper = "simpler" if self.choice.name == "fedavg" else "cheaper"
            yield (
                f"No difference to {rival.title} is found, which {lead} ({self._proof(rival)}), and {self.choice.name} "
                f"is {cheaper}."
            )

    def _alike(self) -> Iterator[str]:
        """Yield which methods the seeds do not tell apart, and how many more would show two points."""
        told = {self.choice.name} | ({self.best.name} if self.best is not None else set())
        alike = [r for r in self.rivals if r.role == "candidate" and r.alike and r.name not in told]
        if not alike:
            if any(rival.role == "candidate" and rival.name not in told for rival in self.rivals):
                yield "Every other method that was tried differs significantly from it."
            return
        equal = [r.title for r in alike if not r.test.mean and r.test.p is None and r.test.n > 1]
        rest = [r for r in alike if r.title not in equal]
        if equal:
            yield f"{_listed(equal)} had exactly the same scores."
        if not rest:
            return
        named = [f"{r.title} ({_facts(r)})" for r in rest]
        yield f"{_listed(named)} {'is' if len(named) == 1 else 'are'} not distinguishable from it."
        nearest = rest[0]
        if nearest.more_seeds is not None:
            size = "two points" if self.metric.share else f"{100 * WANTED:g} % of its value"
            yield (
                f"These seeds would show a difference of {size} to {nearest.title}."
                if nearest.more_seeds <= 0
                else f"{_more(nearest.more_seeds)} would show a difference of {size} to {nearest.title}."
            )

    def _other_rows(self) -> Iterator[str]:
        """Yield what the intervals are about, and those over other test rows and clients, as an evaluation has them."""
        if len(self.choice.scores) > 1:
            yield "Intervals and p-values are about other seeds, not other test rows: the same ones chose the method."
        if any(rival.test.p is not None and rival.p_holm != rival.test.p for rival in self.rivals):
            yield "p-values between methods are corrected for all tests (Holm), intervals are not."
        told = self.choice.interval
        if told is None or told.get("low") is None:
            return
        known = {"rows": told}
        if told.get("low_by_rows") is not None:  # then the other one is over clients
            by_rows = {"rows": told.get("rows"), "low": told["low_by_rows"], "high": told["high_by_rows"]}
            known = {"rows": by_rows, "clients": told}
        ends = []
        for others, own in known.items():
            words, _, whose = interval_of(own, "share" if self.metric.share else "number").partition(", ")
            ends.append(f"{words.replace(' %', '')} over other {others} ({whose})")
        yield f"With seed {min(self.choice.scores)}, the 95 % interval is {_listed(ends)}."

    def _placebo(self) -> Iterator[str]:
        for rival in self.rivals:
            if rival.role == self.choice.name:
                if rival.alike:
                    yield (
                        f"Its placebo, which has its cost and not its idea, is not distinguishable from it "
                        f"({_facts(rival)}), so no gain is shown to come from the idea."
                    )
                else:
                    yield f"It is {self._apart(rival)} its placebo ({self._proof(rival)}){self._below_fedavg(rival)}."

    def _below_fedavg(self, placebo: Rival) -> str:
        """Return that a placebo is worse than FedAvg: it does harm, and a method that does none has shown nothing."""
        base = self._rival("fedavg")
        worse = 0.0 if base is None else placebo.test.mean - base.test.mean
        if (-worse if self.metric.lowest else worse) <= 0:
            return ""
        return (
            f", which is itself {self._size(abs(worse))} worse than FedAvg, so the difference to FedAvg says what the "
            "idea is worth"
        )

    def _modalities(self) -> Iterator[str]:
        if self.alone:
            named = [
                f"{self._number(score)} from {'all' if '+' in subset else f'{subset} alone'}"
                for subset, score in self.alone.items()
            ]
            yield f"On the rows that have every modality it has {_listed(named)}."
        for gain in self.gains:
            to = " and ".join(gain.beside)
            test = gain.test
            if gain.shown:
                yield f"{gain.modality} adds {self._size(test.mean)} to {to} (n = {test.n}, p {_p(test.p)})."
            elif test.p is None and not test.mean:
                yield f"{gain.modality} adds nothing to {to}: the scores are equal on {_seeds(test.n)}."
            else:
                yield (
                    f"{gain.modality} adds nothing to {to} that {_seeds(test.n)} show "
                    f"({self._size(test.mean, signed=True)}, p {_p(test.p)})."
                )
        if self.skipped:
            yield f"What each modality adds was not measured, because {self.skipped}."

    def _left_out(self) -> Iterator[str]:
        lost = dict(self.not_tried or {})
        if not lost:
            return
        named = [f"{name} was not compared, because {why}" for name, why in list(lost.items())[:NAMED]]
        left = len(lost) - NAMED
        more = (
            f"; {counted(left, 'more method was', 'more methods were')} not compared (see the page)" if left > 0 else ""
        )
        yield f"{'; '.join(named)}{more}."

    def _rival(self, name: str) -> Rival | None:
        return next((rival for rival in self.rivals if rival.name == name), None)

    def _apart(self, rival: Rival) -> str:
        """Return by how much the chosen method is better or worse than a rival, in words."""
        better = rival.test.mean < 0 if self.metric.lowest else rival.test.mean > 0
        if not rival.test.mean:
            return "equal to"
        if self.metric.lowest:
            return f"{self._size(abs(rival.test.mean))} {'better' if better else 'worse'} than"
        return f"{self._size(abs(rival.test.mean))} {'above' if better else 'below'}"

    def _proof(self, rival: Rival) -> str:
        test = rival.test
        if test.low is None or test.high is None:
            return f"n = {test.n}"
        low, high = (self._number(value, signed=True) for value in (test.low, test.high))
        return f"95 % interval {low} to {high}, {_facts(rival)}"

    def _size(self, value: float, *, signed: bool = False) -> str:
        return f"{self._number(value, signed=signed)}{' points' if self.metric.share else ''}"

    def _number(self, value: float, *, signed: bool = False) -> str:
        sign = "+" if signed else ""
        return f"{100 * value:{sign}.1f}" if self.metric.share else f"{value:{sign}.4g}"

    def facts(self) -> dict[str, Any]:
        """Return the conclusion in a form that JSON can hold."""
        return {
            "choice": self.choice.name,
            "option": self.choice.option or None,
            "interval": self.choice.interval,
            "settings": dict(self.choice.chosen),
            "metric": self.metric.name,
            "rivals": [
                {"name": r.name, "role": r.role, **vars(r.test), "p_holm": r.p_holm, "more_seeds": r.more_seeds}
                for r in self.rivals
            ],
            "modalities": [{"modality": g.modality, "beside": list(g.beside), **vars(g.test)} for g in self.gains],
            "sentences": list(self.sentences()),
            "paragraph": self.paragraph,
        }


def concluded(
    arms: Sequence[Arm],
    metric: Metric,
    subsets: Mapping[str, Mapping[int, float]],
    not_tried: Mapping[str, str],
    *,
    order: Sequence[Arm],
    skipped: str = "",
) -> Conclusion:
    """Compare the best method with all others that have a score.

    Args:
        arms: all methods of the pilot.
        subsets: subset of the modalities, as in `audio+text` -> seed -> score of the chosen method.
        not_tried: name -> why.
        order: the candidates that had all stages, the best first.
        skipped: why there are no `subsets`.
    """
    choice = simplest(order)
    # scores of a method that failed on other seeds say nothing about it
    compared = (arm for arm in arms if arm.scores and not arm.failed and arm is not choice)
    others = [arm for arm in compared if arm.role in ("candidate", choice.name) and not arm.same]
    base = next((arm for arm in others if arm.name == "fedavg"), None)
    twins = [arm for arm in others if base is not None and _is_twin(arm, base)]
    others = [arm for arm in others if arm not in twins]
    pairs = [(arm, gaps) for arm in others if (gaps := differences(choice.scores, arm.scores))]
    tests = [paired(gaps) for _, gaps in pairs]
    corrected = holm([test.p for test in tests])
    wanted = WANTED if metric.share else WANTED * abs(choice.mean)
    result = []
    for (arm, gaps), test, p in zip(pairs, tests, corrected, strict=True):
        needed = seeds_to_show(gaps, wanted) if wanted else None
        more = None if needed is None else needed - len(gaps)
        result.append(Rival(arm.name, arm.role, test, p, more, arm.title))
    result.sort(key=lambda rival: (-rival.test.n, abs(rival.test.mean), rival.name))
    roles = {arm.role: arm for arm in arms}
    return Conclusion(
        choice,
        metric,
        tuple(result),
        tuple(_gains(subsets, lowest=metric.lowest)),
        roles.get("floor"),
        roles.get("ceiling"),
        roles.get(REFERENCE),
        not_tried,
        None if choice is order[0] else order[0],
        skipped,
        _alone(subsets),
        tuple(arm.title for arm in twins),
    )


def _is_twin(arm: Arm, base: Arm) -> bool:
    """Return whether a method has exactly the scores of another one, as if it were that one."""
    same = all(base.scores.get(seed) == score for seed, score in arm.scores.items())
    return arm is not base and len(arm.scores) > 1 and same


def _alone(subsets: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return the mean scores of the single modalities and of all."""
    whole = max(subsets, key=lambda name: name.count("+"), default="")
    kept = {name: own for name, own in subsets.items() if own and ("+" not in name or name == whole)}
    return {name: sum(own.values()) / len(own) for name, own in kept.items()} if "+" in whole else {}


def simplest(order: Sequence[Arm]) -> Arm:
    """Return the simplest method that is as good as the best: FedAvg, or else the one with the fewest bytes a round.

    Of methods within one standard error of the best, the simplest is taken (Breiman et al., "Classification and
    Regression Trees", 1984); here it is the standard error of the paired differences.

    Args:
        order: methods on the same seeds, the best first.
    """

    def alike(arm: Arm) -> bool:
        gaps = differences(order[0].scores, arm.scores)
        mean, spread = mean_and_spread(gaps) if gaps else (0.0, 0.0)
        return arm is order[0] or (len(gaps) > 1 and abs(mean) <= spread / len(gaps) ** 0.5)

    kept = [arm for arm in order if alike(arm)]
    return min(kept, key=lambda arm: (arm.name != "fedavg", arm.bytes_to_compare, order.index(arm)))


def differences(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Return one minus other for each seed that both have."""
    return [one[seed] - other[seed] for seed in sorted(one) if seed in other]


def _gains(subsets: Mapping[str, Mapping[int, float]], *, lowest: bool) -> Iterator[Gain]:
    """Yield what each modality adds to all others and, with three or more, to all others but one.

    A gain for clients without a modality is yielded only if it is not shown: it says that the modality is idle there.
    """
    whole = max(subsets, key=lambda name: name.count("+"), default="")
    modalities = whole.split("+")
    scores = {frozenset(name.split("+")): own for name, own in subsets.items()}
    if len(modalities) < 2:
        return
    for modality in modalities:
        for absent in ("", *(other for other in modalities if other != modality)):
            beside = tuple(m for m in modalities if m not in (modality, absent))
            both, one = scores.get(frozenset({*beside, modality})), scores.get(frozenset(beside))
            if not beside or both is None or one is None:
                continue
            gaps = differences(one, both) if lowest else differences(both, one)
            gain = Gain(modality, beside, paired(gaps)) if gaps else None
            if gain is not None and (not absent or not gain.shown):
                yield gain


def _facts(rival: Rival) -> str:
    return f"n = {rival.test.n}, p {_p(rival.p_holm)}"


def _p(value: float | None) -> str:
    if value is None:
        return "unknown"
    return "< 0.001" if value < 0.001 else f"= {value:.2g}"


def _seeds(n: int) -> str:
    return counted(n, "seed", "seeds")


def _more(n: int) -> str:
    return counted(n, "more seed", "more seeds")


def _listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence. If there are many, it names the first ones and counts the others."""
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
