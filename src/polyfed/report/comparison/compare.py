"""Compares groups of runs. The runs of a group have the same options; only their seed and fold may differ.

For each group, the comparison shows the mean and the spread over its runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RecipeError
from polyfed.evaluation.client_statistics import mean_and_spread
from polyfed.evaluation.subsets import LACKS, SUBSET, WORST
from polyfed.report.comparison.cells import Cell, Column
from polyfed.report.comparison.folds import check_reach, fold_of, pooled_scores, pooled_uars, rounds_to
from polyfed.report.comparison.labels import flat, labels_of, method_of, parts_of
from polyfed.report.comparison.notes import SHARED_RUNS, notes_of, notes_of_run, other_models
from polyfed.report.formatting import MISSING
from polyfed.report.reading.run_folder import Folder, finished
from polyfed.report.reading.study_folder import Absent, NamedRun, absent_of, runs_of
from polyfed.report.scores import TITLES, lacks_in, lacks_title, subset_title, subsets_in, title_of, unit_of

if TYPE_CHECKING:
    import pandas as pd

AT_BEST = ("accuracy", "macro_f1", "mae", "recall1")
"""The scores of the global model to show for the round with the best validation score."""

POOLED, POOLED_SCORE, REACHED = "pooled.uar", "pooled.score", "rounds_to_accuracy"
"""The cells that `folds.py` computes, from several runs of a group or from the rounds of each run."""


OWN_MODELS = "metrics.global_by_client."
"""The beginning of the names of cells that a run has only if its clients' own models are tested on the server."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed and fold.

    Attributes:
        label: the algorithm, and the options in which the group differs from others.
        folders: the folder of each run.
        seeds: the seed of each run.
        folds: the fold of each run, as `fold_of` writes it. An empty string if the data has no folds.
        cells: column name -> cell.
        method: the part of `label` that is about the algorithm and its options, without the data and the clients.
        scenario: a label for the data and the clients. In a study, it is the name of the scenario. Without a study, it
            lists the options of data and clients in which this group differs from other groups. Empty if all groups
            have the same scenario.
        metrics: the metrics that the study reports in this scenario. Empty if there is no study.
        notes: the runs' warnings, and the parts of the method that had no effect.
        searched: the keys of the recipe whose values the study's search chose.
        settings_of: the method for which the search chose these values, if this is another method. Otherwise empty.
    """

    label: str
    folders: tuple[Folder, ...]
    seeds: tuple[int, ...]
    folds: tuple[str, ...]
    cells: dict[str, Cell]
    method: str = ""
    scenario: str = ""
    metrics: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    settings_of: str = ""

    @property
    def num_folds(self) -> int:
        """The number of different folds."""
        return len(set(self.folds))

    @property
    def other_data(self) -> list[str]:
        """Return the folders of the runs whose data differ from the data of an earlier run of this group.

        Each run is compared with the first run of the group that uses the same fold.
        """
        first: dict[str, Any] = {}
        prints = [folder.facts.get("data", {}).get("sha256") for folder in self.folders]
        for fold, seen in zip(self.folds, prints, strict=True):
            if seen is not None:  # a server of a deployment may have no data
                first.setdefault(fold, seen)
        runs = zip(self.folders, self.folds, prints, strict=True)
        return [folder.path.name for folder, fold, seen in runs if seen is not None and seen != first[fold]]

    @property
    def name(self) -> str:
        """The label, with the number of folds if there are several."""
        return f"{self.label}, {self.num_folds} folds" if self.num_folds > 1 else self.label


@dataclass(frozen=True)
class Comparison:
    """The groups, in the order of their first runs, and the columns that at least one group has.

    Attributes:
        groups: the groups.
        columns: the columns.
        modalities: the modalities of all runs.
        absent: the methods of the studies of which some or all runs are not finished, so that they are not compared.
        chosen: whether `with_columns` chose the columns; `rows` then has no other numbers.
    """

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    modalities: tuple[str, ...]
    absent: tuple[Absent, ...] = ()
    chosen: bool = False

    def with_columns(self, patterns: Iterable[str]) -> "Comparison":
        """Return the comparison with the columns that `patterns` name, in this order.

        Args:
            patterns: names of numbers of `result.json`, such as `metrics.global.uar` or `bytes_up`, in which `*` stands
                for any text. `metrics.` at the beginning can be left out.

        Raises:
            RecipeError: no run has a number of this name.
        """
        shown = {column.name: column for column in self.columns}
        names = list(dict.fromkeys([*shown, *(name for group in self.groups for name in group.cells)]))
        result: dict[str, Column] = {}
        unknown = []
        for pattern in patterns:
            matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"metrics.{pattern}")]
            unknown += [] if matched else [pattern]
            for name in matched:
                plain = Column(name, name.removeprefix("metrics."), unit_of(name.rpartition(".")[2]))
                result[name] = shown.get(name, plain)
        if unknown:
            near = dict.fromkeys(name for pattern in unknown for name in get_close_matches(pattern, names, cutoff=0.3))
            wrong = " or ".join(map(repr, unknown))
            raise RecipeError(
                f"--columns: no run has a number {wrong}. Similar: {', '.join(near) or 'none'}; "
                "`polyfed compare DIR --format csv` has all of them"
            )
        return replace(self, columns=tuple(result.values()), chosen=True)

    @property
    def not_compared(self) -> tuple[str, ...]:
        """Return a sentence for each method that is not compared with all of its runs, with the reason."""
        several = len({group.scenario for group in self.groups} | {absent.scenario for absent in self.absent}) > 1
        return tuple(absent.text(several=several) for absent in self.absent)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the groups' notes, and warnings about values that readers of the comparison could misunderstand.

        There are seven reasons for a warning: groups have different models; a study has runs that are not finished,
        and are therefore not compared; several groups consist of the same runs; a group has no global model, so its
        scores are those of clients' own models; the runs of a group do not all have the same data; several runs of a
        group have the same seed and fold; a group has the settings that the search chose for another method.
        """
        result = [*self.not_compared]
        twins: dict[tuple[Path, ...], list[str]] = {}
        for group in self.groups:
            twins.setdefault(tuple(folder.path for folder in group.folders), []).append(group.name)
        result += [f"{' and '.join(names)}: {SHARED_RUNS}" for names in twins.values() if len(names) > 1]
        result += other_models(self.groups)
        for group in self.groups:
            if any(name.startswith(OWN_MODELS) for name in group.cells):
                result.append(
                    f"{group.name}: it has no global model. The scores on the server's test rows are the mean over the "
                    "clients' own models"
                )
            if names := group.other_data:
                result.append(
                    f"{group.name}: not all runs have the same data; other rows or values in {', '.join(names)}"
                )
            runs = list(zip(group.seeds, group.folds, strict=True))
            for seed, fold in sorted(set(runs)):
                where = f" at {fold}" if group.num_folds > 1 else ""
                if (times := runs.count((seed, fold))) > 1:
                    result.append(f"{group.name}: seed {seed}{where} occurs {times} times, the spread is too small")
            if group.settings_of:
                result.append(f"{group.name}: uses the settings that the search chose for {group.settings_of}")
            result += [f"{group.name}: {note}" for note in group.notes]
        return tuple(result)

    def cell(self, group: Group, column: Column) -> str:
        """Return a cell as text, with "(n=...)" at the end if only n of the group's runs have this value."""
        cell = group.cells.get(column.name)
        fewer = f" (n={cell.n})" if cell is not None and cell.n < cell.of else ""
        return (MISSING if cell is None else cell.text(column.unit)) + fewer

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per group.

        Every row has the keys `label`, `n` and `seeds`, and the keys `<column>` and `<column>.spread` for each number.
        If the group has several folds, its row also has the key `folds`. If the settings come from another method's
        search, its row also has the key `settings_of`.
        `pooled.score.low` and `.high` are the interval of the folds together, the mean of the seeds' intervals.
        `rounds_to_accuracy.n` is the number of runs that reached the accuracy.
        """
        return [
            {"label": group.label, "n": len(group.folders), "seeds": list(group.seeds)}
            | ({"folds": list(group.folds)} if group.num_folds > 1 else {})
            | ({"settings_of": group.settings_of} if group.settings_of else {})
            | {f"{name}.n": cell.n for name, cell in cells.items() if name == REACHED}
            | {name: cell.mean for name, cell in cells.items()}
            | {f"{name}.spread": cell.spread for name, cell in cells.items()}
            | {
                f"{POOLED_SCORE}.{end}": value
                for name, cell in cells.items()
                if name == POOLED_SCORE and cell.interval is not None
                for end, value in zip(("low", "high"), cell.interval, strict=True)
            }
            for group, cells in ((group, self._cells(group)) for group in self.groups)
        ]

    def _cells(self, group: Group) -> dict[str, Cell]:
        if not self.chosen:
            return group.cells
        return {column.name: group.cells[column.name] for column in self.columns if column.name in group.cells}

    def absent_rows(self) -> list[dict[str, Any]]:
        """Return a row with `label`, `n` = 0 and the reason `not_compared` for each method without a finished run."""
        return [
            {"label": absent.method, "n": 0, "seeds": [], "scenario": absent.scenario, "not_compared": absent.why}
            for absent in self.absent
            if absent.whole
        ]

    def frame(self) -> "pd.DataFrame":
        """The rows as a data frame, with the columns `method` and `scenario`."""
        import pandas as pd  # imported here, because it takes half a second

        names = ({"method": group.method, "scenario": group.scenario} for group in self.groups)
        return pd.DataFrame([name | row for name, row in zip(names, self.rows(), strict=True)])


def compare(dirs: Iterable[str | Path], reach: float | None = None) -> Comparison:
    """Group finished runs, and compute the mean and the spread of their numbers.

    Args:
        dirs: folders of runs, or of studies. From the folder of a study, all runs that the study reports are compared.
            A folder that occurs twice counts once. Folders without a finished run are left out with a warning. If no
            folder has a finished run, this is an error.
        reach: an accuracy above 0 and at most 1. If given, also find the first round in which each run has at least
            this accuracy.

    Raises:
        RecipeError: no folder was given, or `reach` is out of range.
        DataError: no folder holds a finished run, or a file is damaged.
    """
    dirs = list(dirs)
    named = runs_of(dirs)
    folders = finished(dict.fromkeys(path for path, _ in named))
    if reach is not None:
        check_reach(reach)
    if not folders:
        raise RecipeError("compare needs folders of runs: polyfed compare DIR DIR ...")
    bundles: dict[str, list[tuple[Folder, NamedRun | None]]] = {}
    for folder, own in ((folders[path], own) for path, own in named if path in folders):
        key = sorted(method_of(folder).items()) if own is None else (own.method, own.scenario)
        bundles.setdefault(repr(key), []).append((folder, own))
    names = _names([bundle[0] for bundle in bundles.values()])
    groups = tuple(
        replace(
            _group(label, [folder for folder, _ in bundle], reach),
            method=own.method,
            scenario=own.scenario,
            metrics=own.metrics,
            searched=own.searched,
            settings_of=own.settings_of,
            notes=(
                *own.edges,
                *notes_of([notes_of_run(() if run is None else run.remarks, folder.result) for folder, run in bundle]),
            ),
        )
        for (label, own), bundle in zip(names, bundles.values(), strict=True)
    )
    modalities = tuple(dict.fromkeys(m for folder in folders.values() for m in folder.modalities))
    return Comparison(groups, _columns(groups, modalities, reach), modalities, tuple(absent_of(dirs)))


def _names(firsts: Sequence[tuple[Folder, NamedRun | None]]) -> list[tuple[str, NamedRun]]:
    """Return the label, method and scenario of each group, given the first run of each group.

    For the runs of a study, the study gives these names. Otherwise, they come from the options in which groups differ.
    """
    plain = [folder for folder, own in firsts if own is None]
    words = iter(zip(labels_of(plain), parts_of(plain), strict=True))
    several = len({own.scenario for _, own in firsts if own is not None}) > 1
    result = []
    for folder, own in firsts:
        if own is None:
            label, (method, scenario) = next(words)
            result.append((label, NamedRun(folder.path, method, scenario)))
        else:
            result.append((f"{own.method} in {own.scenario}" if several else own.method, own))
    return result


def _group(label: str, folders: list[Folder], reach: float | None) -> Group:
    samples: dict[str, list[float]] = {}
    for folder in folders:
        for name, value in flat(folder.result).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                samples.setdefault(name, []).append(float(value))
    if reach is not None:
        first = [rounds_to(folder, reach) for folder in folders]
        samples[REACHED] = [float(number) for number in first if number is not None]
    cells = {name: Cell(*mean_and_spread(v), len(v), len(folders)) for name, v in samples.items() if v}
    if len(folders) == 1:
        cells |= {name: replace(cell, interval=_interval(samples, name)) for name, cell in cells.items()}
    seeds = tuple(int(folder.result.get("seed", 0)) for folder in folders)
    if pooled := pooled_uars(folders):
        cells[POOLED] = Cell(*mean_and_spread(pooled), len(pooled), len(set(seeds)))
    if scores := pooled_scores(folders):
        ends = [(one.low, one.high) for one in scores if one.low is not None and one.high is not None]
        known = (fmean(low for low, _ in ends), fmean(high for _, high in ends)) if len(ends) == len(scores) else None
        values = [one.value for one in scores]
        cells[POOLED_SCORE] = Cell(*mean_and_spread(values), len(values), len(set(seeds)), known)
    return Group(label, tuple(folders), seeds, tuple(fold_of(folder) for folder in folders), cells)


def _interval(samples: Mapping[str, list[float]], name: str) -> tuple[float, float] | None:
    """Return the interval of a metric of a single run, if its result.json has one."""
    ends = [samples.get(f"{name.replace('metrics.', 'intervals.', 1)}.{end}") for end in ("low", "high")]
    low, high = ends
    return None if low is None or high is None else (low[0], high[0])


def _columns(groups: Sequence[Group], modalities: Sequence[str], reach: float | None) -> tuple[Column, ...]:
    heads = {folder.headline for group in groups for folder in group.folders}
    score = heads.copy().pop().title if len(heads) == 1 else "score"
    unit = heads.pop().unit if len(heads) == 1 else "number"
    wanted = [Column(f"metrics.global.{key}", title, unit_of(key)) for key, title in TITLES.items()]
    wanted += [Column(POOLED_SCORE, f"{score}, folds pooled", unit), Column(POOLED, "UAR, folds pooled", "share")]
    wanted += [Column(f"metrics.unimodal.{m}", f"{m} alone", unit) for m in modalities]
    scored = [name for group in groups for name in group.cells]
    for of, whose in (("metrics.global.", ""), ("metrics.personal.", ", personal")):
        wanted += [
            Column(of + SUBSET + name, f"from {subset_title(name)}{whose}", unit) for name in subsets_in(scored, of)
        ]
        wanted.append(Column(of + WORST, f"worst subset{whose}", unit))
        wanted += [
            Column(of + LACKS + name, lacks_title(name) + whose, unit) for name in lacks_in(dict.fromkeys(scored), of)
        ]
    wanted += [
        Column("metrics.personal.mean", "personal", unit),
        Column("metrics.personal.worst", "worst client", unit),
        *(Column(f"best.metrics.global.{key}", f"{title_of(key)} at best", unit_of(key)) for key in AT_BEST),
        Column("bytes_up", "up", "bytes"),
        Column("bytes_down", "down", "bytes"),
        Column("seconds_per_round", "time a round", "seconds"),
        Column("seconds_total", "total time", "seconds"),
        Column("simulated_seconds", "simulated", "seconds"),
        Column("num_parameters", "parameters", "number"),
        Column("rounds", "rounds", "number"),
    ]
    shown = tuple(c for c in wanted if any(c.name in group.cells for group in groups))
    return shown if reach is None else (*shown, Column(REACHED, f"rounds to {100 * reach:g} %", "number"))
