"""`polyfed contribution`: what each client, each modality and each modality of a client added to a finished run.

No training runs again. For a coalition, the updates that the run kept are averaged again, over its clients only, round
after round from the initial model, and the re-assembled model is scored on the server's validation rows. Source: Song,
Tong, Wei, "Profit Allocation for Federated Learning", IEEE Big Data 2019 (one-round reconstruction).

A modality is in a coalition if its encoder gets the updates and the model reads it. A client's block `shared` counts if
any of its modalities is in the coalition. Without players, the initial model reads nothing.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, RecipeError, command, did_you_mean
from polyfed.core.system.files import FACTS, LEAKAGE, RECIPE
from polyfed.core.tree import SHARED, Tree, block_of
from polyfed.evaluation.shapley import Shares, shapley
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.results.run_result import load_run
from polyfed.experiment.results.updates import kept_updates
from polyfed.experiment.running.assembly import Assembly, assemble, facts_of
from polyfed.experiment.running.constants import refuse_changes
from polyfed.federation.client_registry import VALIDATION
from polyfed.objective.base import UNDEFINED
from polyfed.objective.report import Z, t_quantile
from polyfed.report.formatting import seconds_of
from polyfed.report.reading.egress import aggregate
from polyfed.report.reading.run_folder import Folder
from polyfed.report.reading.run_schema import LEAKAGE_AUDIT, RUN_FACTS
from polyfed.report.scores import is_error
from polyfed.training import SingleClientData

CONTRIBUTION = "contribution.json"
"""The file with the result, in the folder of the run."""

MOST_CLIENTS, MOST_MODALITIES, MOST_PAIRS = 8, 6, 8
"""The largest numbers of players whose Shapley values are exact."""

Pair = tuple[str, str]
"""(client or group of clients, modality)"""

MEGABYTE = 1e6


@dataclass(frozen=True)
class Worth:
    """The value of a coalition of pairs: the score of the re-assembled model on the server's validation rows.

    Attributes:
        parts: the run, assembled again.
        updates: for each round, player -> its update.
        weights: player -> its weight in the mean.
        metric: the metric; empty for the task's score.
        known: the values so far.
        rows: coalition -> what each validation row adds to the value, float32 (n,).
    """

    parts: Assembly
    updates: list[dict[str, Tree]]
    weights: Mapping[str, float]
    metric: str = ""
    known: dict[frozenset[Pair], float] = field(default_factory=dict)
    rows: dict[frozenset[Pair], NDArray[np.float64]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The metric."""
        return self.metric or self.parts.fed.context.objective.SCORE

    @property
    def rising(self) -> bool:
        """Whether a larger value is better."""
        objective = self.parts.fed.context.objective
        return objective.RISING if self.name == objective.SCORE else not is_error(self.name)

    @property
    def of_rows(self) -> bool:
        """Whether the metric is a mean over rows, so that the error of their choice is known."""
        objective = self.parts.fed.context.objective
        plain = self.name == "loss" and not getattr(objective, "class_weights", ())  # which the loss of a score lacks
        return not objective.WHOLE and (plain or self.name == objective.SCORE)

    @property
    def pairs(self) -> list[Pair]:
        """The modalities of each client that it has ever sent."""
        sent = {(player, block_of(name)) for of in self.updates for player, tree in of.items() for name in tree}
        order = {m: place for place, m in enumerate(self.parts.model.modalities)}
        pairs = [pair for pair in sent if pair[1] in order]
        return sorted(pairs, key=lambda pair: ([int(k) for k in pair[0].split("+")], order[pair[1]]))

    def of(self, coalition: frozenset[Pair]) -> float:
        """Return the score, negated if a smaller one is better."""
        if coalition not in self.known:
            score, rows = self.score(self.model(coalition), {m for _, m in coalition})
            self.known[coalition], self.rows[coalition] = score, rows
        return self.known[coalition]

    def rows_of(self, coalition: frozenset[Pair]) -> NDArray[np.float64]:
        """Return what each validation row adds to the value, (n,): its sum over rows is 0, its square the variance."""
        self.of(coalition)
        return self.rows[coalition]

    def model(self, coalition: frozenset[Pair]) -> Tree:
        """Return the re-assembled model of a coalition."""
        blocks: dict[str, set[str]] = defaultdict(set)
        for player, modality in coalition:
            blocks[modality].add(player)
            blocks[SHARED].add(player)
        w = {name: value.clone() for name, value in self.parts.initial.items()}
        for of in self.updates:
            for name in w:
                held = [k for k in sorted(of) if k in blocks[block_of(name)] and name in of[k]]
                total = sum(self.weights[k] for k in held)
                for player in held:
                    w[name] += of[player][name] * (self.weights[player] / total)
        return w

    def _rows(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return what each row adds to the metric, a mean of ratios, float64 (B, 2, T)."""
        objective = self.parts.fed.context.objective
        if self.name == objective.SCORE:
            return objective.row_scores(outputs, batch).cpu()
        return torch.stack(objective.row_losses(outputs.double(), batch), 1).unsqueeze(-1).cpu()

    def score(self, w: Tree, read: set[str]) -> tuple[float, NDArray[np.float64]]:
        """Return the score of a model that reads these modalities, and what each row adds to it, (n,)."""
        parts = self.parts
        objective, model = parts.fed.context.objective, parts.model
        names = tuple(m for m in model.modalities if m in read) or model.modalities[:1]
        rows = parts.population.validation_rows
        view = SingleClientData(parts.engine.columns, rows, names, model, 0, 1, 1)
        kept: list[tuple[Tensor, Tensor]] = []

        def step(total: tuple[Tensor | None, list[Tensor]], batch: Batch) -> tuple[Tensor, list[Tensor]]:
            if not read:
                batch = replace(batch, present={names[0]: torch.zeros(len(batch.y), dtype=torch.bool)})
            outputs = objective.outputs(model, w, batch)
            result = objective.sums(outputs, batch)
            each = [self._rows(outputs, batch)] if self.of_rows else []
            if self.name in objective.exact:
                kept.append((outputs, batch.y))
            return result if total[0] is None else total[0] + result, total[1] + each

        sums, each = view.fold(step, (None, []))
        known = objective.measured(sums)
        if kept:
            outputs, y = (torch.cat(part).cpu() for part in zip(*kept, strict=True))
            exact = objective.exact_scores(outputs, Batch({}, y, torch.arange(len(y))))
            known |= {name: value for name, value in zip(objective.exact, exact, strict=True) if value != UNDEFINED}
        score = known.get(self.name, math.nan)
        if not math.isfinite(score):
            raise RecipeError(
                f"--metric {self.name} has no value for a model of this run on the {len(rows):,} validation rows; "
                f"{did_you_mean(self.name, sorted({*known, *objective.exact} - {self.name}))}"
            )
        sign = 1.0 if self.rising else -1.0
        return sign * score, sign * _influences(each)


def _influences(each: list[Tensor]) -> NDArray[np.float64]:
    """Return what each row adds to a score, (n,), from its `row_scores`: the linear part of a mean of ratios."""
    if not each:
        return np.zeros(0)
    above, below = torch.cat(each).unbind(1)
    total = below.sum(0)
    ratio = above.sum(0) / total.clamp(min=1e-300)
    gaps = (above - ratio * below) / total.clamp(min=1e-300)
    result: NDArray[np.float64] = gaps[:, total > 0].mean(1).numpy()
    return result


def contribution(
    folder: str | Path, orders: int = 200, say: Callable[[str], None] = lambda text: None, metric: str = ""
) -> dict[str, Any]:
    """Return what each client, each modality and each modality of a client added to a metric of a run.

    Args:
        folder: the folder of a finished run with `[checkpoint] updates = true` and validation rows on the server.
        orders: the number of random orders, where there are too many players for exact values.
        say: called with a sentence about how long this takes at most, before the work begins.
        metric: the metric, such as `macro_f1` or `loss`; by default the task's score.

    Returns:
        The content of contribution.json.

    Raises:
        PolyfedError: the run is not finished, keeps no updates, has no global model, has no validation rows, or no such
            metric.
    """
    folder = Path(folder).expanduser()
    run = load_run(folder)
    if run.models.shared is None:
        raise RecipeError(
            f"{folder}: {run.models.algorithm} trains no global model whose updates could be averaged again"
        )
    recipe = load_recipe(folder / RECIPE)
    recipe = replace(recipe, engine=replace(recipe.engine, name="sequential", device="cpu"))
    parts = assemble(recipe, folder=folder)
    refuse_changes(Folder(folder).json(FACTS, RUN_FACTS), facts_of(parts), folder, "cannot score coalitions")
    cure = _run_again(parts, folder)
    updates = kept_updates(folder, len(run.rounds), cure)
    _refuse_foreign(updates, parts, folder)
    if VALIDATION not in parts.fed.evaluation_clients:
        raise RecipeError(
            f"{folder}: the server has no validation rows on which coalitions could be scored. Run it with them: {cure}"
        )
    players = sorted({player for of in updates for player in of}, key=lambda k: [int(c) for c in k.split("+")])
    if not players:
        raise RecipeError(
            f"{folder}: {run.models.algorithm} sends no updates of a global model, so nothing is averaged"
        )
    uniform = getattr(recipe.algorithm, "aggregation", "weighted") == "uniform"
    rows = parts.fed.clients.rows_of(parts.fed.clients)
    weights = {k: 1.0 if uniform else float(sum(rows[int(c)] for c in k.split("+"))) for k in players}
    worth = Worth(parts, updates, weights, metric)
    say(_duration(worth, players, orders))
    games = _games(worth, players, orders)
    everyone = frozenset(worth.pairs)
    result = {
        "metric": f"validation.{worth.name}",
        "rising": worth.rising,
        "rows": len(parts.population.validation_rows),
        "none": worth.of(frozenset()),
        "all": worth.of(everyone),
        "run": worth.score(run.params, set(parts.model.modalities))[0],
        "groups": any("+" in player for player in players) or recipe.algorithm.secure_aggregation is not None,
    }
    names = {str(one["id"]): one["name"] for one in facts_of(parts)["clients"] if "name" in one}
    codes = _clients_of_rows(parts)
    result |= {"validation_clients": 0 if codes is None else len(np.unique(codes))}
    return result | {name: _told(shares, folder, names, codes) for name, shares in games.items()}


def _run_again(parts: Assembly, folder: Path) -> str:
    """Return the command that makes a run of which contributions can be computed."""
    wanted = ["checkpoint.updates=true"]
    if VALIDATION not in parts.fed.evaluation_clients:
        share = 0.1 if int(parts.population.train.sizes.max()) >= 10 else 0.5  # rounded down for each client
        wanted += [f"clients.validation={share}"]
        wanted += ["clients.personal_validation=0"] * bool(parts.recipe.clients.personal_validation)
    options = (word for option in wanted for word in ("--set", option))
    return command("run", folder / RECIPE, *options, "--out", folder.with_name(f"{folder.name}-updates"))


def _duration(worth: Worth, players: list[str], orders: int) -> str:
    """Return how many models are scored at most, and how long this takes, from the time of one."""
    started = time.perf_counter()
    worth.of(frozenset(worth.pairs))
    seconds = time.perf_counter() - started
    sizes = ((len(players), MOST_CLIENTS), (len(worth.pairs), MOST_PAIRS), (len(worth.parts.model.modalities), 6))
    count = sum(1 << size if size <= most else orders * size for size, most in sizes)
    return f"scoring at most {count:,} coalitions, {seconds_of(count * seconds)}; --orders sets how many are drawn"


def _clients_of_rows(parts: Assembly) -> NDArray[np.int64] | None:
    """Return the natural client of each validation row, from 0, if they belong to several."""
    columns, rows = parts.population.columns, parts.population.validation_rows
    if columns.client is None:
        return None
    names, codes = torch.unique(columns.client.cpu()[rows], return_inverse=True)
    return codes.numpy() if 1 < len(names) < len(codes) else None


def _error_of_rows(influences: NDArray[np.float64] | None, codes: NDArray[np.int64] | None) -> float | None:
    """Return half the width of the 95 % interval that the choice of rows, or of their clients, gives a value, or None.

    It is known only for a metric that is a mean over rows.
    """
    if influences is None or not len(influences):
        return None
    if codes is None:
        return Z * float(np.sqrt(np.square(influences).sum()))
    sums = np.bincount(codes, influences)
    count = len(np.unique(codes))
    return t_quantile(count) * float(np.sqrt(np.square(sums).sum() * count / (count - 1)))


def _refuse_foreign(updates: list[dict[str, Tree]], parts: Assembly, folder: Path) -> None:
    """Refuse updates that the run cannot have kept.

    Raises:
        DataError: an update is of no client, has another shape than the model, or is not finite.
    """
    num, initial = len(parts.fed.clients), parts.initial
    for round, of in enumerate(updates, 1):
        for player, tree in of.items():
            numbers = [int(part) if part.isascii() and part.isdecimal() else num for part in player.split("+")]
            wrong = next((n for n, v in tree.items() if n in initial and v.shape != initial[n].shape), None)
            wrong = wrong or next((n for n, v in tree.items() if not bool(torch.isfinite(v).all())), None)
            if max(numbers) >= num or wrong:
                what = f"'{wrong}' of client {player!r:.40}" if wrong else f"client {player!r:.40}"
                raise DataError(
                    f"{folder}: the updates of round {round} are not those of this run: {what} does not fit. Restore "
                    "them from a copy"
                )


def _games(worth: Worth, players: list[str], orders: int) -> dict[str, Shares[Any]]:
    pairs = worth.pairs

    def of_clients(coalition: frozenset[str]) -> float:
        return worth.of(frozenset(pair for pair in pairs if pair[0] in coalition))

    def rows_of_clients(coalition: frozenset[str]) -> NDArray[np.float64]:
        return worth.rows_of(frozenset(pair for pair in pairs if pair[0] in coalition))

    def of_modalities(coalition: frozenset[str]) -> float:
        return worth.of(frozenset(pair for pair in pairs if pair[1] in coalition))

    def rows_of_modalities(coalition: frozenset[str]) -> NDArray[np.float64]:
        return worth.rows_of(frozenset(pair for pair in pairs if pair[1] in coalition))

    modalities = [m for m in worth.parts.model.modalities if any(m == pair[1] for pair in pairs)]
    return {
        "clients": shapley(players, of_clients, MOST_CLIENTS, orders, rows=rows_of_clients),
        "modalities": shapley(modalities, of_modalities, MOST_MODALITIES, orders, rows=rows_of_modalities),
        "pairs": shapley(pairs, worth.of, MOST_PAIRS, orders, rows=worth.rows_of),
    }


def _told(
    shares: Shares[Any], folder: Path, names: Mapping[str, str], codes: NDArray[np.int64] | None
) -> dict[str, Any]:
    """Return the values of a game with their errors, the bytes that each player sent and what the audit says.

    Args:
        shares: the values.
        folder: the run's folder.
        names: the names of clients, by number.
        codes: the natural client of each validation row, or None.
    """
    sent, advantages = _bytes_up(folder), _advantages(folder)
    lines = []
    for player, value in shares.values.items():
        pair = player if isinstance(player, tuple) else None
        modality = pair[1] if pair else (player if not player[:1].isdigit() else None)
        clients = None if modality == player else {int(c) for c in (pair[0] if pair else player).split("+")}
        total = sum(
            size
            for (client, block), size in sent.items()
            if (clients is None or client in clients) and (modality is None or block == modality)
        )
        of_orders, of_rows = shares.errors[player], _error_of_rows(shares.influences.get(player), codes)
        error = math.hypot(of_orders, of_rows or 0.0)
        line = {"player": list(player) if pair else player, "value": value, "error": error}
        line |= {"error_of_orders": of_orders, "error_of_rows": of_rows}
        if modality != player:
            number = pair[0] if pair else player
            line["name"] = "+".join(names.get(client, client) for client in number.split("+"))
        line |= {"bytes_up": total, "per_megabyte": value / (total / MEGABYTE) if total else None}
        line["advantage"] = advantages.get(modality) if modality else max(advantages.values(), default=None)
        lines.append(line)
    return {"exact": shares.exact, "players": lines}


def _bytes_up(folder: Path) -> dict[tuple[int, str], int]:
    result: dict[tuple[int, str], int] = defaultdict(int)
    for (client, block, _, destination), size in aggregate(Folder(folder)).clients.items():
        if destination != "client":
            result[client, block] += size
    return result


def _advantages(folder: Path) -> dict[str, float]:
    """Return the largest advantage of an attack on each block, according to `polyfed audit`; empty without an audit."""
    facts = Folder(folder).json(LEAKAGE, LEAKAGE_AUDIT)
    result: dict[str, float] = {}
    for one in facts["findings"] if facts else ():
        if one["status"] == "measured" and one["advantage"] is not None:
            result[one["block"]] = max(result.get(one["block"], 0.0), one["advantage"])
    return result


def write(content: dict[str, Any], folder: Path) -> Path:
    """Write contribution.json into the folder of the run, and return its path."""
    path = folder / CONTRIBUTION
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path
