"""The sentences are made from the numbers: every number is computed again here, from the scores alone."""

import re

import numpy as np
import pytest
from scipy import stats

from polyfed.recommendation.conclusion import concluded
from polyfed.recommendation.pilot import Arm
from polyfed.report.comparison.paired_tests import seeds_to_show
from polyfed.report.scores import Metric

ACCURACY = Metric("global.accuracy", lowest=False, share=True)
ERROR = Metric("global.mae", lowest=True, share=False)


def arm(name: str, scores: list[float], role: str = "candidate", **more: object) -> Arm:
    return Arm(name, role, {"algorithm": {"name": name}}, scores=dict(enumerate(scores, 1)), **more)  # type: ignore[arg-type]


def drawn(seed: int, mean: float, spread: float = 0.02, n: int = 5) -> list[float]:
    return list(np.random.default_rng(seed).normal(mean, spread, n))


def by_scipy(one: list[float], other: list[float]) -> tuple[float, float, float, float]:
    n = min(len(one), len(other))
    gaps = np.asarray(one[:n]) - np.asarray(other[:n])
    found = stats.ttest_1samp(gaps, 0.0)
    interval = found.confidence_interval(0.95)
    return float(gaps.mean()), float(found.pvalue), float(interval.low), float(interval.high)


@pytest.mark.parametrize("seed", range(12))
def test_every_number_of_the_paragraph_is_right(seed: int) -> None:
    best, base, third = drawn(seed, 0.80), drawn(seed + 100, 0.79), drawn(seed + 200, 0.60)
    if np.mean(base) > np.mean(best):
        best, base = base, best
    low, high, control = drawn(seed + 300, 0.4), drawn(seed + 400, 0.9), drawn(seed + 500, 0.79)
    arms = [
        arm("fedavgm", best, chosen={"train.lr": 0.3}),
        arm("fedavg", base),
        arm("moon", third),
        arm("local", low, "floor"),
        arm("centralized", high, "ceiling"),
        arm("fedavgm placebo", control, "fedavgm"),
    ]
    found = concluded(arms, ACCURACY, {}, {"partialfl": "it shares nothing"}, order=[arms[0]])
    text = found.paragraph
    n = len(best)
    assert text.startswith(
        f"Take fedavgm with train.lr = 0.3: global.accuracy (%) is {100 * np.mean(best):.1f} ± "
        f"{100 * np.std(best, ddof=1):.1f} (standard deviation) over {n} seeds, against {100 * np.mean(low):.1f} where "
        f"every client trains alone (scored on the rows of all) and {100 * np.mean(high):.1f} where the server has all "
        "rows."
    )
    raw = {name: by_scipy(best, other) for name, other in (("fedavg", base), ("moon", third), ("placebo", control))}
    order = sorted(raw, key=lambda name: raw[name][1])
    holm, last = {}, 0.0
    for place, name in enumerate(order):
        last = max(last, min(1.0, (3 - place) * raw[name][1]))
        holm[name] = last
    mean, _, lower, upper = raw["fedavg"]
    p = "< 0.001" if holm["fedavg"] < 0.001 else f"= {holm['fedavg']:.2g}"
    assert (
        f"It is {100 * mean:.1f} points above FedAvg (95 % interval {100 * lower:+.1f} to {100 * upper:+.1f}, n = {n}, "
        f"p {p})."
    ) in text
    assert ("fedavg (n = 5" in text) == (holm["fedavg"] >= 0.05)
    assert ("is not distinguishable from it (n = 5" in text) == (holm["placebo"] >= 0.05)
    if holm["fedavg"] >= 0.05:
        gaps = np.asarray(best) - np.asarray(base)
        more = needed(gaps, 0.02) - n
        wanted = f"{more} more seed{'s' if more > 1 else ''} would show" if more > 0 else "These seeds would show"
        assert f"{wanted} a difference of two points to fedavg." in text
    assert "moon" not in text, "a method that differs is in the table, not in the paragraph"
    assert "partialfl was not compared, because it shares nothing." in text


def needed(gaps: np.ndarray, wanted: float) -> int:
    """The smallest n of which statsmodels' formula for the power of a t-test gives 80 %, tried one by one."""
    effect = wanted / np.std(gaps, ddof=1)
    for n in range(2, 10_000):
        bound = stats.t.ppf(0.975, n - 1)
        shift = effect * np.sqrt(n)
        if 1 - stats.nct.cdf(bound, n - 1, shift) + stats.nct.cdf(-bound, n - 1, shift) >= 0.8:
            return n
    return 10_000


@pytest.mark.parametrize("effect", [0.4, 1.0, 2.5])
def test_the_number_of_seeds_has_the_power_that_it_promises(effect: float) -> None:
    """Simulated, not computed: of many samples of this size, four of five find the difference."""
    gaps = [0.0, 1.0, 2.0, 3.0]
    n = seeds_to_show(gaps, effect * float(np.std(gaps, ddof=1)))
    assert n is not None
    draws = np.random.default_rng(0)
    for size, enough in ((n, True), (n - max(1, n // 5), False)):
        if size > 1:
            samples = draws.normal(effect, 1.0, (20_000, size))
            power = float((stats.ttest_1samp(samples, 0.0, axis=1).pvalue < 0.05).mean())
            assert (power >= 0.79) == enough, (size, power)
    assert seeds_to_show([0.1], 0.02) is None
    assert seeds_to_show([0.1, 0.1], 0.02) == 2
    assert seeds_to_show([-1.0, 1.0], 1e-9) == 10_000


def test_of_methods_that_are_alike_the_simplest_is_taken() -> None:
    best, base = arm("fedprox", [0.81, 0.83, 0.80, 0.82]), arm("fedavg", [0.80, 0.83, 0.81, 0.81])
    found = concluded([best, base], ACCURACY, {}, {}, order=[best, base])
    assert found.choice is base
    assert found.paragraph.startswith("Take fedavg: ")
    mean, p, low, high = by_scipy([*base.scores.values()], [*best.scores.values()])
    assert (
        f"No difference to fedprox is found, which is {100 * -mean:.1f} points better (95 % interval {100 * low:+.1f} "
        f"to {100 * high:+.1f}, n = 4, p = {p:.2g}), and fedavg is simpler."
    ) in found.paragraph
    clear = arm("fedprox", [0.85, 0.87, 0.86, 0.85])
    assert concluded([clear, base], ACCURACY, {}, {}, order=[clear, base]).choice is clear
    cheap = arm("moon", [0.81, 0.83, 0.80, 0.82], round_bytes=1.0)
    dear = arm("scaffold", [0.82, 0.83, 0.80, 0.82], round_bytes=2.0)
    assert concluded([dear, cheap], ACCURACY, {}, {}, order=[dear, cheap]).choice is cheap
    unmeasured = arm("scaffold", [0.82, 0.83, 0.80, 0.82])
    assert concluded([unmeasured, cheap], ACCURACY, {}, {}, order=[unmeasured, cheap]).choice is cheap
    single = arm("fedprox", [0.9])
    assert concluded([single, arm("fedavg", [0.8])], ACCURACY, {}, {}, order=[single, base]).choice is single


def test_a_better_linear_model_is_named_and_is_no_rival() -> None:
    base, linear = arm("fedavg", [0.80, 0.81]), arm("linear", [0.90, 0.91], "reference")
    found = concluded([base, linear], ACCURACY, {}, {}, order=[base])
    assert "against 90.5 by a linear model on all rows in one place. The linear model is 10.0 points better" in (
        found.paragraph
    )
    assert found.rivals == ()


def test_a_ceiling_below_the_choice_is_explained() -> None:
    base, low, high = drawn(0, 0.9), drawn(1, 0.85), drawn(2, 0.95)
    for metric, ceiling, told in ((ACCURACY, low, True), (ACCURACY, high, False), (ERROR, low, False)):
        arms = [arm("fedavg", base), arm("centralized", ceiling, "ceiling")]
        text = concluded(arms, metric, {}, {}, order=arms[:1]).paragraph
        assert ("a reference, which a method can exceed" in text) == told
        if told:
            mean, p, *_ = by_scipy(base, ceiling)
            assert f"Training on all rows at the server is {100 * mean:.1f} worse" in text.replace(" points", "")
            assert f"(n = 5, p {'< 0.001' if p < 0.001 else f'= {p:.2g}'})" in text


def test_a_method_that_one_option_makes_possible_is_named_with_it() -> None:
    best = arm("fedproto", drawn(0, 0.9), option="mode = mm_fedavg", chosen={"train.lr": 0.1}, near="It is near.")
    rival = arm("cmsfed", [*list(best.scores.values())[:4], 0.9], option="prototypes = local")
    text = concluded([best, rival], ACCURACY, {}, {}, order=[best]).paragraph
    assert text.startswith("Take fedproto with mode = mm_fedavg, train.lr = 0.1: ")
    assert "cmsfed with prototypes = local (n = 5" in text
    assert " It is near. " in text


def test_the_interval_over_test_rows_is_that_of_the_run() -> None:
    told = {"low": 0.8791, "high": 0.9561, "rows": 352, "clients": 8}
    one = arm("fedavg", [0.92, 0.93], interval=told)
    text = concluded([one], ACCURACY, {}, {}, order=[one]).paragraph
    assert text.endswith("With seed 1, the 95 % interval is 87.9 to 95.6 over other rows (352 rows of 8 clients).")
    one.interval = {**told, "low_by_rows": 0.891, "high_by_rows": 0.948}
    text = concluded([one], ACCURACY, {}, {}, order=[one]).paragraph
    assert text.endswith(
        "the 95 % interval is 89.1 to 94.8 over other rows (352 rows) and 87.9 to 95.6 over other clients (352 rows of "
        "8 clients)."
    )
    one.interval = {"rows": 3}
    assert "over other rows" not in concluded([one], ACCURACY, {}, {}, order=[one]).paragraph


def test_the_paragraph_says_what_its_intervals_do_not_cover() -> None:
    arms = [arm("fedavg", [0.80, 0.81]), arm("local", [0.5, 0.6], "floor")]
    assert concluded(arms, ACCURACY, {}, {}, order=arms[:1]).paragraph.endswith(
        "Intervals and p-values are about other seeds, not other test rows: the same ones chose the method."
    )
    own = concluded(arms, Metric("personal.mean", False, True), {}, {}, order=arms[:1]).paragraph
    assert "where every client trains alone." in own, "each on its own rows"


def test_without_a_score_it_still_ends_with_what_is_known() -> None:
    found = concluded([arm("fedavg", [], validation=0.8)], ACCURACY, {}, {}, order=[arm("fedavg", [], validation=0.8)])
    assert found.paragraph == (
        "Take fedavg for now: the time was too short for runs on the reported seeds; on validation rows it had 80.0."
    )


def test_equal_scores_are_named_as_equal() -> None:
    same = drawn(1, 0.8)
    arms = [arm("fedavg", same), arm("splitfed", list(same))]
    text = concluded(arms, ACCURACY, {}, {}, order=arms).paragraph
    assert "splitfed had exactly the same scores." in text
    assert "distinguishable" not in text


def test_methods_with_the_scores_of_fedavg_are_tested_as_one() -> None:
    best, base = arm("feddyn", drawn(1, 0.9)), drawn(2, 0.8)
    arms = [best, arm("fedavg", base), arm("ditto", base[:3]), arm("apfl", [*base[:2], 0.7]), arm("moon", base[:1])]
    found = concluded(arms, ACCURACY, {}, {}, order=[best])
    assert "ditto had exactly FedAvg's scores." in found.paragraph
    assert {rival.name for rival in found.rivals} == {"fedavg", "apfl", "moon"}
    assert "(Holm), intervals are not." in found.paragraph
    raw = {
        name: by_scipy(list(best.scores.values()), list(arms[place].scores.values()))
        for name, place in (("fedavg", 1), ("apfl", 3))
    }
    assert found.rivals[0].p_holm == pytest.approx(min(1.0, 2 * raw["fedavg"][1]))


def test_a_placebo_below_fedavg_is_told_as_one_that_does_harm() -> None:
    scores = [0.90, 0.91, 0.92, 0.90]
    best, base = arm("feddyn", scores), arm("fedavg", [one - 0.01 - 0.001 * n for n, one in enumerate(scores)])
    for lost, told in ((0.05, True), (0.005, False)):
        placebo = arm("feddyn placebo", [one - lost - 0.001 * n for n, one in enumerate(scores)], "feddyn")
        text = concluded([best, base, placebo], ACCURACY, {}, {}, order=[best]).paragraph
        assert ("its placebo" in text, "which is itself 4.0 points worse than FedAvg" in text) == (True, told)


def test_an_error_is_better_if_it_is_smaller() -> None:
    arms = [arm("moon", [0.50, 0.51, 0.52]), arm("fedavg", [0.71, 0.70, 0.74])]
    text = concluded(arms, ERROR, {}, {}, order=arms).paragraph
    assert "Take moon: global.mae is 0.51 ± 0.01 (standard deviation) over 3 seeds." in text
    assert "It is 0.2067 better than FedAvg" in text
    assert "Every other method that was tried differs significantly from it." in text


def test_what_the_modalities_add_is_computed_over_the_seeds() -> None:
    text, audio, both = [0.70, 0.71, 0.72], [0.40, 0.35, 0.41], [0.701, 0.708, 0.723]
    subsets = {name: dict(enumerate(own)) for name, own in (("text", text), ("audio", audio), ("audio+text", both))}
    one = arm("fedavg", both)
    found = concluded([one], ACCURACY, subsets, {}, order=[one])
    gains = {gain.modality: gain for gain in found.gains}
    mean, p, *_ = by_scipy(both, text)
    assert (gains["audio"].test.mean, gains["audio"].test.p) == pytest.approx((mean, p))
    assert "audio adds nothing to text that 3 seeds show (+0.1 points, p = 0.69)" in found.paragraph
    alone = "On the rows that have every modality it has 71.0 from text alone, 38.7 from audio alone and 71.1 from all."
    assert alone in found.paragraph
    assert re.search(r"text adds 32\.\d points to audio \(n = 3, p ", found.paragraph)


def test_a_modality_that_is_idle_only_for_some_clients_is_named() -> None:
    values = {"a": 0.5, "b": 0.6, "c": 0.4, "a+b": 0.7, "a+c": 0.5, "b+c": 0.8, "a+b+c": 0.9}
    noise = [0.0, 0.003, -0.002]
    subsets = {name: {n: value + noise[n] * (1 + len(name)) for n in range(3)} for name, value in values.items()}
    one = arm("fedavg", [0.9, 0.9, 0.9])
    found = concluded([one], ACCURACY, subsets, {}, order=[one])
    assert "c adds nothing to a that 3 seeds show" in found.paragraph  # for clients without b
    assert "c adds 20" in found.paragraph
    assert not any(gain.beside == ("b",) and gain.modality == "c" for gain in found.gains)


def test_edges_and_the_end_of_the_time_are_said() -> None:
    one = arm("fedavg", [0.8], edges=["the search chose train.lr = 1, the largest value of its range"])
    found = concluded([one], ACCURACY, {}, dict.fromkeys("abcde", "no"), order=[one])
    assert "The search chose train.lr = 1, the largest value of its range." in found.paragraph
    assert "2 more methods were not compared (see the page)." in found.paragraph
    assert "is 80.0 over 1 seed." in found.paragraph


def test_a_method_that_failed_on_some_seeds_is_not_called_alike() -> None:
    best, broken = arm("fedavg", drawn(1, 0.8)), arm("feddyn", drawn(1, 0.8)[:2], failed=True)
    assert "feddyn" not in concluded([best, broken], ACCURACY, {}, {}, order=[best]).paragraph
    broken.failed = False
    assert "feddyn" in concluded([best, broken], ACCURACY, {}, {}, order=[best]).paragraph


@pytest.mark.parametrize(
    ("validation", "metric", "told"),
    [
        (0.975, ACCURACY, True),
        (0.55, ACCURACY, True),
        (0.78, ACCURACY, False),
        (None, ACCURACY, False),
        (3.0, ERROR, False),
    ],
)
def test_validation_rows_that_are_unlike_the_test_rows_are_told(
    validation: float | None, metric: Metric, told: bool
) -> None:
    chosen = arm("fedavg", [0.75, 0.76, 0.74], validation=validation)
    text = concluded([chosen], metric, {}, {}, order=[chosen]).paragraph
    assert ("they are unlike the test rows" in text) == told
    assert ("On the validation rows it has 97.5:" in text) == (validation == 0.975)
