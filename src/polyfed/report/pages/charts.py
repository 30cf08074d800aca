"""The charts of a run's report, as data. The script of the page draws the charts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from polyfed.report.formatting import seconds_of
from polyfed.report.reading.history import History
from polyfed.report.scores import TITLES, title_of, unit_of

MOST_POINTS = 1500
"""The largest number of points of a chart. More rounds are averaged in bins, because no screen could show them."""

Unit = Literal["share", "bytes", "seconds", "number"]
Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        label: the name in the legend.
        values: one entry per point. The entry is None if the point has no value.
        colour: number in the page's palette. A modality has the same colour in every chart.
        dashed: whether the curve is dashed, for values that are not measured on the test set.
        low: lower edge of a band around the curve.
        high: upper edge of this band.
    """

    label: str
    values: Values
    colour: int
    dashed: bool = False
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True)
class Chart:
    """A chart: curves over the same x axis.

    Attributes:
        name: the id of the chart on the page.
        title: the heading.
        caption: a sentence that describes the chart.
        unit: the unit in which values are written.
        x: the positions on the x axis, ascending.
        series: the curves.
        x_label: the label of the x axis.
    """

    name: str
    title: str
    caption: str
    unit: Unit
    x: Sequence[float]
    series: Sequence[Series]
    x_label: str = "round"

    @property
    def has_values(self) -> bool:
        """Whether at least one curve has a value."""
        return any(v is not None for one in self.series for v in one.values)

    def table(self) -> dict[str, Any]:
        """The chart as data for the page's script: at most MOST_POINTS points, six digits."""
        step = -(-len(self.x) // MOST_POINTS) or 1
        table = asdict(self)
        table["x"] = list(self.x[step - 1 :: step]) + ([self.x[-1]] if len(self.x) % step else [])
        for series in table["series"]:
            for part in ("values", "low", "high"):
                series[part] = None if series[part] is None else binned(series[part], step)
        if step > 1:
            table["caption"] += f" Each point is the mean of {step} rounds."
        return table


def binned(values: Values, step: int) -> list[float | None]:
    """Means over bins of `step` values, with six digits. None is ignored."""
    bins = (values[start : start + step] for start in range(0, len(values), step))
    kept = ([v for v in part if v is not None] for part in bins)
    return [float(f"{sum(part) / len(part):.6g}") if part else None for part in kept]


def charts_of(history: History, modalities: Sequence[str], captions: Mapping[str, str]) -> list[Chart]:
    """The charts about the whole run. A chart is left out if it has no values."""
    charts = [
        accuracy(history, modalities),
        scores(history),
        loss(history),
        personal(history),
        ranked(history),
        traffic(history),
        timing(history),
        *prices(history),
        *logged(history, modalities, captions),
    ]
    return [chart for chart in charts if chart.has_values]


def accuracy(history: History, modalities: Sequence[str]) -> Chart:
    """The score of the global model, such as accuracy, with all modalities and with each modality alone."""
    head = history.headline
    alone = history.group("unimodal.")
    order = [*(m for m in modalities if m in alone), *(m for m in alone if m not in modalities)]
    series = _present(history, [("all modalities", f"global.{head.score}", 0, False)])
    series += [Series(f"{m} alone", alone[m], colour_of(m, modalities)) for m in order]
    series += _present(history, [("validation", f"validation.{head.score}", 0, True)])
    return Chart(
        "accuracy",
        headed(head.title),
        "The global model on the test set: with all modalities, and with one modality alone.",
        head.unit,
        history.rounds,
        series,
    )


def scores(history: History) -> Chart:
    """All scores of the global model except the headline score, which the chart `accuracy` shows."""
    names = [name for name in TITLES if name != history.headline.score and f"global.{name}" in history.columns]
    series = _present(history, [(title_of(name), f"global.{name}", n, False) for n, name in enumerate(names, 1)])
    caption = "The global model on the test set; `polyfed docs evaluation` defines the scores."
    unit: Unit = "number" if any(unit_of(name) == "number" for name in names) else "share"
    return Chart("scores", "Other scores", caption, unit, history.rounds, series)


def headed(title: str) -> str:
    """A title with a capital first letter."""
    return title[:1].upper() + title[1:]


def loss(history: History) -> Chart:
    """Loss in training and in evaluation."""
    wanted = [
        ("training", "train_loss", 0, False),
        ("test", "global.loss", 1, False),
        ("validation", "validation.loss", 1, True),
    ]
    caption = "Training: mean over the cohort's rows. Test and validation: the global model."
    return Chart("loss", "Loss", caption, "number", history.rounds, _present(history, wanted))


def personal(history: History) -> Chart:
    """The spread of the clients' scores on their own test rows."""
    head = history.headline
    part = history.group("personal_accuracy.")
    series: list[Series] = []
    if part:
        series = [
            Series("median client", part["median"], 0, low=part["lower"], high=part["upper"]),
            Series("worst client", part["worst"], 1),
            Series("best client", part["best"], 2),
        ]
    series += _present(history, [("mean", "personal.mean", 3, True)])
    caption = f"{headed(head.title)} of clients on their own test rows; the band covers the middle half of the clients."
    return Chart("personal", f"Personal {head.title} over rounds", caption, head.unit, history.rounds, series)


def ranked(history: History) -> Chart:
    """The clients, from worst to best, in the last evaluated round."""
    head = history.headline
    values = sorted(history.personal.values(), reverse=not head.rising)
    share = [100.0 * (rank + 0.5) / len(values) for rank in range(len(values))]
    return Chart(
        "ranked",
        f"Personal {head.title}, worst client to best",
        f"The last measured {head.title} of every client on its own test rows, the worst first.",
        head.unit,
        share,
        [Series(head.title, values, 0)],
        "percent of clients",
    )


def traffic(history: History) -> Chart:
    """Bytes per round."""
    wanted = [("up, client to server", "bytes_up", 0, False), ("down", "bytes_down", 1, True)]
    wanted += [
        ("evaluation, up", "evaluation.bytes_up", 2, False),
        ("evaluation, down", "evaluation.bytes_down", 3, True),
    ]
    caption = "Bytes of tensors in messages that clients received or sent in a round: for training, and for evaluation."
    series = [one for one in _present(history, wanted) if one.colour < 2 or any(one.values)]
    return Chart("traffic", "Bytes per round", caption, "bytes", history.rounds, series)


def timing(history: History) -> Chart:
    """Seconds per round."""
    wanted = [
        ("training and aggregation", "seconds.train", 0, False),
        ("evaluation", "seconds.evaluate", 1, False),
        ("simulated network", "simulated_seconds", 2, True),
    ]
    caption = "Wall-clock time of this machine, and simulated time if the recipe has a section [network]."
    first = history.columns.get("seconds.train", [None])[:1]
    if len(history.rounds) < 3 or first[0] is None:
        return Chart("timing", "Seconds per round", caption, "seconds", history.rounds, _present(history, wanted))
    caption += f" The first round, which also warms up, took {seconds_of(first[0])} to train and is not drawn."
    series = [replace(one, values=one.values[1:]) for one in _present(history, wanted)]
    return Chart("timing", "Seconds per round", caption, "seconds", history.rounds[1:], series)


def prices(history: History) -> list[Chart]:
    """Return the charts of the score against the cost.

    The costs are bytes, simulated time if the recipe has a section [network], and local rounds and exchanges if the
    algorithm logs them. For local rounds and exchanges, there are also charts of the test loss.
    """
    head = history.headline
    scores = [("all modalities", f"global.{head.score}", 0, False), ("clients' own", "personal.mean", 1, False)]
    loss = [("test", "global.loss", 1, False)]
    up, down, seconds = (history.columns.get(name, ()) for name in ("bytes_up", "bytes_down", "simulated_seconds"))
    moved = accumulate((a or 0.0) + (b or 0.0) for a, b in zip(up, down, strict=True))
    spent: list[tuple[str, str, list[float], bool]] = [
        ("bytes", "MB, both ways", [total / 1e6 for total in moved], False),
        ("simulated time", "simulated seconds", list(accumulate(value or 0.0 for value in seconds)), False),
    ]
    for name in ("local rounds", "exchanges"):
        counted = history.columns.get(f"logged.{name.replace(' ', '_')}", ())
        spent.append((name, name, [value or 0.0 for value in counted], True))
    charts = []
    for number, (what, label, x, with_loss) in enumerate(spent):
        if not x or not x[-1]:
            continue
        caption = "The x axis is the total since round 1. Clients' own: the mean over their own test rows."
        series = _present(history, scores)
        title = f"{headed(head.title)} against {what}"
        charts.append(Chart(f"price-{number}", title, caption, head.unit, x, series, label))
        if with_loss:
            curves = _present(history, loss)
            charts.append(
                Chart(f"price-loss-{number}", f"Test loss against {what}", caption, "number", x, curves, label)
            )
    return charts


def logged(history: History, modalities: Sequence[str], captions: Mapping[str, str]) -> list[Chart]:
    """Return a chart for each name that the algorithm logs. `name.part` is a curve in the chart of `name`."""
    families: dict[str, dict[str, Values]] = {}
    for name, values in history.group("logged.").items():
        family, _, part = name.replace("/", ".").partition(".")
        families.setdefault(family, {})[part or family] = values
    charts = []
    for number, (family, parts) in enumerate(sorted(families.items())):
        of_modalities = any(part in modalities for part in parts)
        series = [
            Series(part, values, colour_of(part, modalities) if of_modalities else place)
            for place, (part, values) in enumerate(parts.items())
        ]
        title = family.replace("_", " ")
        caption = captions.get(family, "A number that the method logs; its page explains it.")
        charts.append(Chart(f"logged-{number}", title, caption, "number", history.rounds, series))
    return charts


def colour_of(modality: str, modalities: Sequence[str]) -> int:
    """Return a modality's colour in the palette. Colour 0 is for all modalities together."""
    return 1 + (list(modalities).index(modality) if modality in modalities else len(modalities))


def _present(history: History, wanted: Iterable[tuple[str, str, int, bool]]) -> list[Series]:
    """A curve for each (label, column, colour, dashed) whose column has at least one value."""
    return [
        Series(label, history.columns[name], colour, dashed)
        for label, name, colour, dashed in wanted
        if any(value is not None for value in history.columns.get(name, ()))
    ]
