"""What a site reports in an evaluation job, and what the reports of all sites say together.

A report holds sums and counts only (`objective/report.py`), of classes and groups that are large enough to be shown.
The sums of all sites are those of one pooled file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.messages import HISTOGRAM, Message, carries, message
from polyfed.core.option_checks import NOT_NEGATIVE, between
from polyfed.core.tree import Tree
from polyfed.evaluation.scores import all_rows
from polyfed.evaluation.two_models import disagreement, paired_areas, paired_means, paired_shares, within_sites
from polyfed.federation.context import ClientContext
from polyfed.model import Model
from polyfed.objective import Objective
from polyfed.objective.report import (
    LEVELS,
    SHARES,
    UNKNOWN,
    at_levels,
    by_client,
    coarsened,
    moments,
    shown_columns,
    shown_targets,
    wilson,
)
from polyfed.training import ClientData
from polyfed.training.client_data import FOLD_BATCH

STEPS = 8
"""A device rounds its `joint_shares` up to a multiple of 1 / STEPS, which never makes an interval too small."""

Values = Mapping[str, Sequence[Any]]
"""Column -> the values that name its groups, in the order of their codes."""


@message
class SiteScores(Message):
    """A site's report on its own test rows.

    `sums` (S,) are the objective's `site_sums`, and `num_rows` is the number of rows in them. `groups` (G, 1 + W) has a
    row for each value of each column: the number of rows of the group, and the objective's `group_sums`. A hidden group
    is 0. `levels` (K,) says how far the bins of each histogram in `sums` are joined (`objective.report.coarsened`).
    `shares` (2,) are the `joint_shares` of the rows, or (0,) without histograms.
    `hidden` is 1 if the site has hidden a class or a group, because it has too few rows. `float32` is 1 if the model
    could not compute in float64 (`exact_outputs`).
    """

    sums: Tensor = carries("statistic", dtype="sums", shape=(None,), tells=HISTOGRAM, scored=True)
    groups: Tensor = carries("statistic", dtype="sums", shape=(None, None), tells=HISTOGRAM, within=None, scored=True)
    levels: Tensor = carries("statistic", dtype="int64", within=between(0, LEVELS), shape=(None,), scored=True)
    shares: Tensor = carries("statistic", dtype="sums", within=between(0, 1), shape=(None,), scored=True)
    num_rows: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, scored=True)
    hidden: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, scored=True)
    float32: Tensor = carries("statistic", dtype="int64", within=between(0, 1), scored=True)


@message
class TwoModels(Message):
    """Two models to compare on the same rows."""

    params: Tree = carries("parameters")
    against: Tree = carries("parameters")


@message
class Compared(Message):
    """On how many of a site's rows both models, only the first, only the second, and none are right: `cells`, (4,).

    A class with few rows counts nowhere, as in `SiteScores`. `areas` (K, 4) has a row for each label or class of the
    objective's `ranked_rows`: the number of compared rows, and `paired_areas`. It is 0 if one side has too few rows.
    `gaps` (P, 13) has a row for each metric and target of the objective's `row_metrics`: the `moments` of what each row
    adds to the metric's denominator, and to its numerators of both models.
    """

    cells: Tensor = carries("statistic", dtype="int64", within=NOT_NEGATIVE, shape=(4,), scored=True)
    areas: Tensor = carries("statistic", dtype="sums", within=NOT_NEGATIVE, shape=(None, 4), scored=True)
    gaps: Tensor = carries("statistic", dtype="sums", within=NOT_NEGATIVE, shape=(None, 13), scored=True)


def exact_outputs(model: Model, objective: Objective, w: Tree, rows: ClientData) -> tuple[Tensor, Tensor] | None:
    """Return a model's outputs for all rows, (n, ...), and their labels, on the CPU; None without rows.

    Both are float64 where they are not class numbers. In float32, the last digits of a row's outputs depend on the
    rows of its batch, so on who holds it, and on the machine. A model that cannot compute in float64, or is so large
    that a copy of its constants might not fit, computes in float32.
    """

    def in_float64() -> tuple[Tensor, Batch] | None:
        with model.in_float64(w) as wide:
            return all_rows(
                rows,
                lambda batch: objective.outputs(
                    model, wide, replace(batch, x={m: value.double() for m, value in batch.x.items()})
                ),
                FOLD_BATCH // 2,  # as much memory as in float32
            )

    found = None
    if sum(tensor.numel() for tensor in model.held()) <= MOST_NUMBERS:
        try:
            found = in_float64()
        except Exception:  # any error of a user's module; a real one comes again in float32
            found = None
    found = found or all_rows(rows, lambda batch: objective.outputs(model, w, batch))
    return on_cpu(found, rows)


def on_cpu(found: tuple[Tensor, Batch] | None, rows: ClientData) -> tuple[Tensor, Tensor] | None:
    """Return the outputs and labels of `all_rows` without padding."""
    if found is None:
        return None
    outputs, y = (value[: int(rows.num_rows)].cpu() for value in (found[0], found[1].y))
    return outputs, y.to(outputs.dtype) if y.is_floating_point() else y


MOST_NUMBERS = 2**28
"""The largest model that computes in float64: its constants are then copied, which takes 2 GiB."""


def site_scores(
    context: ClientContext,
    w: Tree,
    rows: ClientData,
    values: Values,
    least: int,
    predict: Callable[[Batch], Tensor] | None = None,
) -> SiteScores:
    """Compute a site's report.

    Args:
        w: the model.
        rows: the rows to score.
        values: the columns and the values that name their groups.
        least: the smallest number of rows of a class or group that may be shown.
        predict: returns the outputs for a batch, of rows whose samples are not all here; by default those of `w`.
    """
    objective, model = context.objective, context.model
    none = torch.zeros(0, *objective.outputs_shape(model)).double(), objective.no_labels(context.num_classes)
    exact = exact_outputs(model, objective, w, rows) if predict is None else on_cpu(all_rows(rows, predict), rows)
    outputs, all_y = exact or none
    kept, y = objective.visible(all_y, least)
    total = None
    for part in (
        [kept.nonzero()[:, 0]]
        if objective.WHOLE or objective.PAIRS
        else torch.split(kept.nonzero()[:, 0], 16 * FOLD_BATCH)
    ):
        sums = objective.site_sums(outputs[part], Batch({}, y[part], torch.arange(len(part))))
        total = sums if total is None else total + sums
    hidden = int((~kept).sum()) > 0 or not torch.equal(y.isnan(), all_y.isnan())
    tables = []
    codes_of = {name: rows.groups[name].cpu() for name in sorted(rows.groups)}
    shown_of = shown_columns({name: codes[kept] for name, codes in codes_of.items()}, y[kept], least)
    for name, names in values.items():
        codes, shown = codes_of[name], shown_of[name]
        targets = shown_targets(codes[kept], shown, y[kept], least) if y.is_floating_point() else None
        hidden = hidden or not bool(shown.all()) or (targets is not None and not bool(targets.all()))
        for code in range(len(names)):
            known = code < len(shown) and bool(shown[code])
            of = (kept & (codes == code) if known else torch.zeros_like(kept)).nonzero()[:, 0]
            own = y[of] if targets is None or not known else torch.where(targets[code], y[of], torch.nan)
            sums = objective.group_sums(outputs[of], Batch({}, own, torch.arange(len(of))))
            tables.append(torch.cat([torch.tensor([float(len(of))], dtype=torch.float64), sums]))
    assert total is not None, "a split of no rows has one part"
    groups = torch.stack(tables) if tables else torch.zeros(0, 0, dtype=torch.float64)
    total, levels = total.double().clone(), torch.zeros(0, dtype=torch.int64)
    if (bins := objective.score_bins(total)) is not None:
        joined, levels = coarsened(bins, least)
        bins.copy_(joined)
    some = kept.nonzero()[:, 0]
    shares = objective.joint_shares(outputs[some], Batch({}, y[some], torch.arange(len(some))))
    if least > 1:  # a real number of a model that the server made could tell a whole feature of a row
        shares = (shares * STEPS).ceil() / STEPS
    counts = (int(kept.sum()), int(hidden), int(outputs.dtype is not torch.float64))
    return SiteScores(total, groups, levels, shares, *map(torch.tensor, counts))


def compared(context: ClientContext, first: Tree, second: Tree, rows: ClientData, least: int, labels: int) -> Compared:
    """Compute a site's report on two models.

    Args:
        first: the first model.
        second: the second model.
        rows: the rows on which both predict.
        least: the smallest number of rows of a class that may be shown.
        labels: the number of labels or classes of the objective's `ranked_rows`.
    """
    objective, model = context.objective, context.model
    given: list[Tensor] = []
    for w in (first, second):
        found = exact_outputs(model, objective, w, rows)
        if found is None:
            none = torch.zeros(4, dtype=torch.int64), torch.zeros(labels, 4, dtype=torch.float64)
            return Compared(*none, torch.zeros(sum(metrics_compared(context).values()), 13, dtype=torch.float64))
        given.append(found[0])
        y = found[1]
    kept, shown = objective.visible(y, least)
    cells = torch.zeros(4, dtype=torch.int64)
    if objective.OF_CLASSES:
        right = [objective.decided(outputs) == y for outputs in given]
        cells = torch.bincount((2 * (~right[0]).long() + (~right[1]).long())[kept], minlength=4)
    given, y = [one[kept] for one in given], shown[kept]
    return Compared(cells, site_areas(objective, given, y, least), site_gaps(objective, given, y))


def metrics_compared(context: ClientContext) -> dict[str, int]:
    """Return the metrics of `Compared.gaps`, each with its number of targets."""
    objective = context.objective
    y = objective.no_labels(context.num_classes)
    outputs = torch.zeros(0, *objective.outputs_shape(context.model))
    none = objective.row_metrics(outputs, Batch({}, y, torch.arange(0)))
    return {name: parts.shape[-1] for name, parts in none.items()}


def site_gaps(objective: Objective, outputs: Sequence[Tensor], y: Tensor) -> Tensor:
    """Return `Compared.gaps`, given the outputs of both models for some rows."""
    batch = Batch({}, y, torch.arange(len(y)))
    first, second = (objective.row_metrics(one, batch) for one in outputs)
    result = [torch.zeros(0, 13, dtype=torch.float64)]
    for name, parts in first.items():
        above, below = parts.double().unbind(1)  # (B, T)
        some = (below > 0).double()
        result.append(moments(torch.stack([some, below, above, second[name].double()[:, 0]], -1).movedim(0, 1)))
    return torch.cat(result)


def site_areas(objective: Objective, outputs: Sequence[Tensor], y: Tensor, least: int) -> Tensor:
    """Return `Compared.areas`, given the outputs of both models for some rows, and the fewest rows of a shown side."""
    if objective.ranked_rows(outputs[0], Batch({}, y, torch.arange(len(y)))) is None:
        return torch.zeros(0, 4, dtype=torch.float64)
    ranked = [objective.ranked_rows(one, Batch({}, y, torch.arange(len(y)))) for one in outputs]
    assert ranked[0] is not None
    assert ranked[1] is not None
    _, positive, negative = ranked[0]
    result = torch.zeros(positive.shape[1], 4, dtype=torch.float64)
    for place in range(len(result)):
        some = (positive | negative)[:, place]
        sides = (int(positive[:, place].sum()), int(negative[:, place].sum()))
        scores = (one[0][some, place].double().numpy() for one in ranked if one is not None)
        areas = paired_areas(positive[some, place].numpy(), *scores) if min(sides) >= max(least, 1) else None
        if areas is None:
            continue
        first, second, variance = areas
        if least > 1 and variance:  # its last digits could tell the order of single rows
            variance = 2.0 ** (math.ceil(STEPS * math.log2(variance)) / STEPS)
        result[place] = torch.tensor([sum(sides), first, second, variance], dtype=torch.float64)
    return result


MOST_VARIANCE = 4.0
"""No variance of `paired_areas` is larger, because the components of a difference lie between -1 and 1."""


def flaw_of_two(objective: Objective, reply: Compared, rows: float, labels: int, parts: int) -> str:
    """Return why a site's report on two models is impossible for its number of rows, or ""."""
    counts, areas = reply.cells, reply.areas.cpu()
    if bool((counts < 0).any()) or float(counts.sum()) != (rows if objective.OF_CLASSES else 0):
        return "counts other rows than it has"
    if len(areas) != labels or bool((areas < 0).any()):
        return "has areas of another shape than the job asks for"
    if bool((areas > torch.tensor([rows, 1.0, 1.0, MOST_VARIANCE], dtype=torch.float64)).any()):
        return "has areas that no rows have"
    gaps = reply.gaps.cpu()
    if len(gaps) != parts or bool((gaps[:, 0] > rows).any()):
        return "compares other metrics than the job asks for"
    sums, squares = gaps[:, 1:4], gaps[:, 4:].view(-1, 3, 3).diagonal(dim1=-2, dim2=-1)
    # the inequality of Cauchy and Schwarz, with slack for rounding
    if bool((gaps < 0).any()) or bool((sums.square() > gaps[:, :1] * squares * (1 + 1e-6) + 1e-9).any()):
        return "has sums of errors that no rows have"
    return ""


def flaw_of(objective: Objective, reply: SiteScores, values: Values, size: int) -> str:
    """Return why a site's report is impossible, or "".

    Args:
        objective: the task.
        reply: the report.
        values: the columns and the values that name their groups.
        size: the length of `sums`.
    """
    rows, count = float(reply.num_rows), sum(len(names) for names in values.values())
    if len(reply.sums) != size or len(reply.groups) != count:
        return "has sums of another length than the job asks for"
    if bool((reply.groups[:, :1] < 0).any()) or float(reply.groups[:, :1].sum()) > rows * max(len(values), 1):
        return "counts more rows in its groups than it has"
    bins = objective.score_bins(reply.sums.cpu())
    if len(reply.levels) != (0 if bins is None else bins.shape[1]):
        return "has levels of another length than the job asks for"
    if len(reply.shares) != (0 if bins is None else len(UNKNOWN)):
        return "has shares of another length than the job asks for"
    return objective.site_flaw(reply.sums.cpu(), rows)


def of_sites(context: ClientContext, sites: Mapping[str, Compared], rows: Mapping[str, int]) -> dict[str, Any]:
    """Return the entry `comparison` of an evaluation job: McNemar's test, the AUROCs, and the difference at each site.

    Args:
        context: the task and the model.
        sites: the name of a site -> its report.
        rows: the name of a site -> the number of rows in its report.
    """
    objective = context.objective
    result: dict[str, Any] = {"rows": sum(rows[name] for name in sites), "bootstrap": {}}
    if (count := sum(rows[name] > 0 for name in sites)) > 1:
        result["clients"] = count
    if gaps := _paired(context, sites):
        result["paired"] = gaps
    cells = {name: [int(number) for number in one.cells.tolist()] for name, one in sites.items() if one.cells.sum()}
    if cells:
        _, first, second, _ = (sum(own[place] for own in cells.values()) for place in range(4))
        more = np.array([float(own[1] - own[2]) for own in cells.values()]) if len(cells) > 1 else None
        result["mcnemar"] = asdict(disagreement(first, second, more))
        result["by_site"] = {name: asdict(paired_shares(*own)) | {"rows": sum(own)} for name, own in cells.items()}
    areas = torch.stack([one.areas.cpu() for one in sites.values()]).double().numpy()  # (S, K, 4)
    tests = {}
    for place in range(areas.shape[1]):
        known = areas[:, place][areas[:, place, 0] > 0]
        if len(known):
            label = objective.ranked_name(place, areas.shape[1], None)
            tests[label] = asdict(within_sites(known[:, 0], known[:, 1:])) | {
                "rows": round(known[:, 0].sum()), "sites": len(known)
            }  # fmt: skip
    return result | ({"delong_within_sites": tests} if tests else {})


def _paired(context: ClientContext, sites: Mapping[str, Compared]) -> dict[str, dict[str, Any]]:
    """Return `paired_means` of each metric and target of `Compared.gaps` that some rows have."""
    result, lines = {}, {site: iter(one.gaps.tolist()) for site, one in sites.items()}
    for metric, targets in metrics_compared(context).items():
        for place in range(targets):
            label = context.objective.ranked_name(place, targets, None)
            told = {site: next(line) for site, line in lines.items()}
            name = metric if targets == 1 else f"{metric} of {label}"
            result[name] = paired_means(told, root=metric == "rmse")
    return {name: one for name, one in result.items() if one}


def summary(
    objective: Objective, sites: Mapping[str, SiteScores], values: Values, class_names: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return the entry `evaluation` of result.json: metrics, support and groups of each site and of all.

    Args:
        objective: the task.
        sites: the name of a site -> its report.
        values: the columns and the values that name their groups.
        class_names: the names of the classes or labels.
    """
    each = {name: _of_site(objective, one.sums, one, values) for name, one in sites.items()}
    for name, one in sites.items():
        each[name] |= {"hidden": bool(one.hidden), "float32": bool(one.float32)}
    together = list(sites.values())
    rows = torch.stack([one.num_rows.cpu().double() for one in together])
    shares = torch.stack([one.shares.cpu() for one in together])
    everyone = SiteScores(
        _pooled(objective, together).sum(0),
        torch.stack([one.groups.cpu() for one in together]).sum(0),
        together[0].levels,
        (shares * rows.unsqueeze(-1)).sum(0) / rows.sum().clamp(min=1.0),
        rows.sum().long(),
        torch.stack([one.hidden.cpu() for one in together]).amax(),
        torch.stack([one.float32.cpu() for one in together]).amax(),
    )
    pooled = _of_site(objective, everyone.sums, everyone, values)
    pooled |= {"hidden": bool(everyone.hidden), "float32": bool(everyone.float32)}
    _add_intervals(objective, pooled, _pooled(objective, [one for one in together if int(one.num_rows)]))
    if values:
        _add_group_intervals(objective, pooled, torch.stack([one.groups.cpu() for one in together]))
    names = {} if class_names is None else {"classes": list(class_names)}
    return {"task": objective.NAME, "score": objective.SCORE, **names, "pooled": pooled, "sites": each}


def _add_intervals(objective: Objective, pooled: dict[str, Any], sums: Tensor) -> None:
    """Add the intervals over sites to the pooled metrics. Those over rows take the rows of a site as independent.

    Args:
        objective: the task.
        pooled: the pooled metrics, which this function changes.
        sums: the sums of each site with rows, (K, S).
    """
    parts = _in_parts(sums)
    if len(parts) < 2:
        return
    left = [objective.estimates(parts.sum(0) - part, draws=0) for part in parts]
    for name, told in pooled["metrics"].items():
        without = [one[name].value if name in one else math.nan for one in left]
        if (ends := by_client(told["value"], without, share=name in SHARES, metric=name)) is not None:
            error = told.get("error", 0.0)
            ends = (max(ends[0] - error, 0.0), min(ends[1] + error, 1.0)) if name in SHARES else ends
            told |= {"low_by_rows": told["low"], "high_by_rows": told["high"], "clients": len(sums)}
            told |= {"low": ends[0], "high": ends[1]}


def _add_group_intervals(objective: Objective, pooled: dict[str, Any], lines: Tensor) -> None:
    """Add the intervals over sites to the scores of the groups, as `_add_intervals` does.

    Args:
        objective: the task.
        pooled: what `_of_site` returned, which this function changes.
        lines: the `groups` of each site, (K, G, 1 + W).
    """
    score = objective.SCORE
    scores = [told[score] for groups in pooled["groups"].values() for told in groups.values()]
    for told, line in zip(scores, lines.unbind(1), strict=True):
        some = line[line[:, 0] > 0]
        if told["value"] is None or len(parts := _in_parts(some)) < 2:
            continue
        left = [some.sum(0) - part for part in parts]
        each = [objective.group_score(one[1:], float(one[0])) for one in left]
        without = [math.nan if one is None else one for one in each]
        if (ends := by_client(told["value"], without, share=score in SHARES, metric=score)) is not None:
            by_rows = {f"{end}_by_rows": told.get(end) for end in ("low", "high")}
            told |= by_rows | {"clients": len(some), "low": ends[0], "high": ends[1]}


def _in_parts(sums: Tensor) -> Tensor:
    """Return the sums of each site, (K, ...), or, of too many sites, those of `MOST_SITES` groups of them."""
    if len(sums) <= MOST_SITES:
        return sums
    return torch.stack([sums[place::MOST_SITES].sum(0) for place in range(MOST_SITES)])


MOST_SITES = 200
"""The largest number of groups that the jackknife leaves out; more sites are put into so many groups."""


def _pooled(objective: Objective, sites: Sequence[SiteScores]) -> Tensor:
    """Return the sums of each site, (K, S), with every histogram at the coarsest level of a site."""
    result = torch.stack([one.sums.cpu() for one in sites]) if sites else torch.zeros(0, 0)
    for sums in result:
        if (bins := objective.score_bins(sums)) is not None:
            levels = torch.stack([one.levels.cpu() for one in sites]).amax(0)
            bins.copy_(at_levels(bins, levels))
    return result


def _of_site(objective: Objective, sums: Tensor, site: SiteScores, values: Values) -> dict[str, Any]:
    rows, groups, shares = float(site.num_rows), site.groups, site.shares.tolist() or UNKNOWN
    metrics = (
        {name: one.within(name).facts() for name, one in objective.estimates(sums.cpu(), shares).items()}
        if rows
        else {}
    )
    result = {"rows": int(rows), "support": objective.support(sums.cpu()) if rows else [], "metrics": metrics}
    lines = iter(groups.cpu())
    tables: dict[str, dict[str, Any]] = {}
    for column, names in values.items():
        for name in names:
            size, *_ = line = next(lines)
            score = objective.group_score(line[1:], float(size)) if float(size) else None
            whole = objective.SCORE == "accuracy" and score is not None and objective.OF_CLASSES
            one = wilson(score * float(size), float(size)).facts() if whole and score is not None else {"value": score}
            tables.setdefault(column, {})[str(name)] = {"rows": int(size), objective.SCORE: one}
    return result | ({"groups": tables} if values else {})
