"""Charts about calibration, about single clients, about updates, and about which clients were picked for a round.

The module `charts` makes the charts about the whole run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyfed.core.errors import RecipeError
from polyfed.report.pages.charts import MOST_POINTS, Chart, Series, colour_of
from polyfed.report.reading import history
from polyfed.report.reading.history import History
from polyfed.report.reading.run_folder import Folder


def calibration(folder: Folder) -> list[Chart]:
    """The reliability diagram: accuracy by confidence. Empty if result.json has no calibration."""
    facts: Mapping[str, Any] = folder.result.get("calibration") or {}
    bins = [b for b in zip(*(facts.get(k, ()) for k in ("rows", "confidence", "right")), strict=False) if b[0] > 0]
    if not bins:
        return []
    total = sum(rows for rows, _, _ in bins)
    sure = [confidence / rows for rows, confidence, _ in bins]
    caption = (
        "Each point is a bin of test rows with similar confidence. On the dashed line the model is as often right as "
        f"it is sure; below the line it is too sure. Expected calibration error: {100 * facts['ece']:.1f} %."
    )
    series = [
        Series("accuracy", [right / rows for rows, _, right in bins], 1),
        Series("as sure as right", sure, 0, dashed=True),
        Series("share of the rows", [rows / total for rows, _, _ in bins], 2),
    ]
    return [Chart("calibration", "Calibration", caption, "share", sure, series, "confidence")]


def gains(past: History, folder: Folder, baseline: Folder | None) -> list[Chart]:
    """Draw each client's gain in personal accuracy over another run, in ascending order.

    A negative gain means that the client has a lower personal accuracy than in the other run.

    Args:
        past: the rounds of the run.
        folder: the run.
        baseline: the other run, such as a run of FedAvg or Local. If None, there is no chart.

    Raises:
        RecipeError: the runs do not measure the same clients on the same data.
    """
    if baseline is None:
        return []
    other = history.read(baseline)
    for name, own, theirs in (
        ("data", *(f.facts.get("data", {}).get("sha256") for f in (folder, baseline))),
        ("seed", folder.recipe.get("seed"), baseline.recipe.get("seed")),
    ):
        if own != theirs:
            raise RecipeError(
                f"--baseline {baseline.path}: its {name} is {theirs}, that of {folder.path} is {own}. Give a run of "
                "another method on the same data with the same seed"
            )
    both = sorted(past.personal.keys() & other.personal.keys())
    if not both:
        raise RecipeError(
            f"--baseline {baseline.path}: no client has a personal accuracy in both runs. Set [clients] personal_test"
        )
    found = sorted(past.personal[client] - other.personal[client] for client in both)
    name = str(baseline.recipe.get("algorithm", {}).get("name", baseline.path.name))
    better, worse = sum(gain > 0 for gain in found), sum(gain < 0 for gain in found)
    caption = (
        f"Personal accuracy of this run minus that of {name} ({baseline.path.name}), client by client, after the last "
        f"evaluation: {better:,} clients gain, {worse:,} lose, {len(found) - better - worse:,} stay. "
        f"Mean {100 * sum(found) / len(found):+.1f} points."
    )
    share = [100.0 * (rank + 0.5) / len(found) for rank in range(len(found))]
    series = [Series("gain", found, 1), Series("no change", [0.0] * len(found), 0, dashed=True)]
    return [Chart("gains", f"Gain of each client over {name}", caption, "share", share, series, "percent of clients")]


def norms(past: History, modalities: Sequence[str]) -> list[Chart]:
    """How far the global model moves in a round, and how far the clients' models move on average, by block."""
    series = []
    for part, label, dashed in (("model", "", False), ("clients", ", clients' mean", True)):
        for block, values in past.group(f"norms.{part}.").items():
            series.append(Series(f"{block}{label}", values, colour_of(block, modalities), dashed))
    if not series:
        return []
    caption = (
        "Solid: the 2-norm of the change of the global model in the round, which is its pseudo-gradient times the "
        "server's learning rate. Dashed: the mean norm of what single clients changed, over at most 8 of them."
    )
    return [Chart("norms", "Norm of the updates, by block", caption, "number", past.rounds, series)]


def picks(past: History, modalities: Sequence[str], num_clients: int) -> list[Chart]:
    """Return the charts about which clients were picked.

    They show how many clients sent each block, which share of the clients was picked so far, and how often each client
    was picked.
    """
    charts = []
    if sent := past.group("sent."):
        series = [Series(block, values, colour_of(block, modalities)) for block, values in sent.items()]
        caption = "How many clients sent parameters of each block in the round."
        charts.append(Chart("sent", "Picks by block", caption, "number", past.rounds, series))
    times = sorted(past.picked.values())
    if num_clients and times and max(times) != min([*times, *[0] * (num_clients - len(times))]):
        caption = "The share of all clients that were asked at least once so far."
        values = past.columns["picked_so_far"]
        shares = [None if value is None else value / num_clients for value in values]
        charts.append(
            Chart("picked", "Clients picked so far", caption, "share", past.rounds, [Series("clients", shares, 1)])
        )
        charts.append(_times(times, num_clients))
    return charts


def _times(times: Sequence[int], num_clients: int) -> Chart:
    """Draw a chart with the number of rounds in which each client was asked.

    Args:
        times: for each client that was asked at least once, the number of rounds in which it was asked. The numbers are
            in ascending order.
        num_clients: the number of all clients. If a chart cannot show so many points, each point is the mean of several
            clients that are next to each other in ascending order.
    """
    num = max(num_clients, len(times))  # a damaged run.json may say less
    every = np.zeros(num)
    every[num - len(times) :] = times
    step = -(-num // MOST_POINTS)
    starts = np.arange(0, num, step)
    ends = np.minimum(starts + step, num)
    means = np.add.reduceat(every, starts) / (ends - starts)
    share = 100.0 * (starts + ends) / 2 / num
    caption = "In how many rounds each client was asked, in ascending order."
    caption += f" Each point is the mean of {step:,} clients." if step > 1 else ""
    series = [Series("rounds", means.tolist(), 1)]
    return Chart("times", "Picks of each client", caption, "number", share.tolist(), series, "% of clients")


def coefficients(past: History) -> list[Chart]:
    """The entries of each logged matrix over rounds. The matrices themselves are at the end of the page."""
    charts = []
    for number, name in enumerate(past.tables):
        parts = past.group(f"table.{name}.")
        series = [
            Series(label, parts[label], colour, dashed=label in ("smallest", "largest"))
            for colour, label in enumerate(("mean", "diagonal", "smallest", "largest"))
            if label in parts
        ]
        caption = "Entries of the matrix of this name that the algorithm logs; on the diagonal, a client meets itself."
        title = f"{name.replace('_', ' ')}, over rounds"
        charts.append(Chart(f"entries-{number}", title, caption, "number", past.rounds, series))
    return charts
