"""The curves of a comparison: for each group, the mean over its runs, and a band from the lowest to the highest run."""

from collections.abc import Sequence

from polyfed.report.comparison.compare import Comparison, Group
from polyfed.report.pages.charts import Chart, Series, Unit, headed
from polyfed.report.reading import history
from polyfed.report.scores import Headline, title_of, unit_of

CURVES = ("macro_f1", "auroc", "pearson")
"""The metrics that get curves besides the score of the runs."""


def curves_of(comparison: Comparison) -> list[Chart]:
    """Charts with a curve for every group, without charts that have no values."""
    heads = {folder.headline for group in comparison.groups for folder in group.folders}
    head = heads.pop() if len(heads) == 1 else Headline()
    wanted: list[tuple[str, str, Unit, str]] = [
        (f"global.{name}", headed(title_of(name)), unit_of(name), "The global model on the test set.")
        for name in dict.fromkeys((head.score, *CURVES))
    ]
    wanted += [
        (f"unimodal.{m}", f"{headed(head.title)} of {m} alone", head.unit, "The global model with one modality alone.")
        for m in comparison.modalities
    ]
    wanted += [
        ("personal.mean", f"Personal {head.title}", head.unit, "Mean over clients, on their own test rows."),
        ("train_loss", "Training loss", "number", "Mean over the cohort's rows."),
        ("bytes_up", "Bytes up per round", "bytes", "Client to server."),
        ("seconds.train", "Seconds per round", "seconds", "Training and aggregation."),
    ]
    pasts = [[history.read(folder) for folder in group.folders] for group in comparison.groups]
    charts = []
    for number, (column, title, unit, caption) in enumerate(wanted):
        tracks = [_track(past, column) for past in pasts]
        rounds = sorted({round for track in tracks for round in track})
        series = [
            _series(group, track, rounds, colour)
            for colour, (group, track) in enumerate(zip(comparison.groups, tracks, strict=True))
            if track
        ]
        if series:
            charts.append(Chart(f"curve-{number}", title, caption, unit, rounds, series))
    return charts


def _track(past: Sequence[history.History], column: str) -> dict[int, list[float]]:
    """Round -> the values of all runs."""
    track: dict[int, list[float]] = {}
    for one in past:
        for round, value in zip(one.rounds, one.columns.get(column, ()), strict=False):
            if value is not None:
                track.setdefault(round, []).append(value)
    return track


def _series(group: Group, track: dict[int, list[float]], rounds: Sequence[int], colour: int) -> Series:
    values = [track.get(round) for round in rounds]
    mean = [sum(v) / len(v) if v else None for v in values]
    if len(group.folders) == 1:
        return Series(group.name, mean, colour)
    low = [min(v) if v else None for v in values]
    high = [max(v) if v else None for v in values]
    return Series(f"{group.name} (n={len(group.folders)})", mean, colour, low=low, high=high)
