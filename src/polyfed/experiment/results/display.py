"""How runs and recipes look in a notebook, and the rounds of a run as data frames."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from polyfed.report.formatting import bytes_of, number_of, seconds_of

if TYPE_CHECKING:
    import pandas as pd


def recipe_line(table: Mapping[str, Any]) -> str:
    """Return one line about a recipe: algorithm, data, clients, rounds, seed.

    Args:
        table: the resolved recipe, as `Recipe.table` returns it.
    """
    clients, engine = table["clients"], table["engine"]["name"]
    who = f"{clients['num']} clients" if "num" in clients else f"clients {clients['partition']}"
    head = f"{table['algorithm']['name']} on {table['data']['name']}, {who}"
    return f"Recipe({head}, {table['rounds']} rounds, seed {table['seed']}, engine {engine})"


def recipe_html(table: Mapping[str, Any]) -> str:
    """Return a recipe as HTML for a notebook: the text of `recipe_line`. A click on it shows all sections."""
    rows = [(f"{section}.{key}", value) for section, own in _sections(table) for key, value in own.items()]
    rows = [("seed", table["seed"]), ("rounds", table["rounds"]), *rows]
    inside = _table([(key, str(value)) for key, value in rows])
    return f"<details><summary>{escape(recipe_line(table))}</summary>{inside}</details>"


def run_html(result: Mapping[str, Any], line: str) -> str:
    """Return a finished run as HTML for a notebook: its scores and its cost.

    Args:
        result: the content of result.json.
        line: the text of the run's `repr`.
    """
    rows = [
        (f"{group}: {name.replace('_', ' ')}", number_of(value, "number" if name == "loss" else "share"))
        for group, scores in result["metrics"].items()
        for name, value in scores.items()
    ]
    rows.append(("bytes up, down", f"{bytes_of(result['bytes_up'])}, {bytes_of(result['bytes_down'])}"))
    rows.append(("time per round", seconds_of(result["seconds_per_round"])))
    return f"<div>{escape(line)}{_table(rows)}</div>"


def metrics_frame(rounds: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return the metrics of all evaluated rounds, one value in each row.

    The columns are `round`, `group`, `metric` and `value`.

    Args:
        rounds: rows of rounds.jsonl.
    """
    import pandas as pd  # imported here, because it takes half a second, and a client may start a process per request

    rows = [
        (row["round"], group, metric, value)
        for row in rounds
        for group, scores in row.get("metrics", {}).items()
        for metric, value in scores.items()
    ]
    return pd.DataFrame(rows, columns=["round", "group", "metric", "value"])


def clients_frame(rounds: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """Return a row for each client that is known, was in a cohort or was evaluated. The index is the client's number.

    The columns `rows`, `modalities` and `labels` say what a client holds: its number of training rows, its modalities,
    and its training rows of each class.

    The column `asked` holds the number of rounds in which the client was in the cohort and received a request. The
    column `missing` holds the number of rounds in which its reply was missing. The column `personal_score` holds the
    last measured score of the client's model, which is the accuracy or another score of the task.

    Args:
        rounds: rows of rounds.jsonl.
        known: the entries `clients` of run.json.
    """
    import pandas as pd

    facts = {int(one["id"]): one for one in known}
    asked: dict[int, int] = {}
    missing: dict[int, int] = {}
    accuracy: dict[int, float] = {}
    for row in rounds:
        for client in row.get("cohort", ()):
            asked[client] = asked.get(client, 0) + 1
        for client in map(int, row.get("missing", {})):
            missing[client] = missing.get(client, 0) + 1
        scores = row.get("personal_accuracy") or row.get("personal_score", {})
        accuracy |= {int(client): value for client, value in scores.items()}
    index = pd.Index(sorted({*facts, *asked, *missing, *accuracy}), name="client")
    return pd.DataFrame(
        {
            "rows": pd.array([facts.get(client, {}).get("rows") for client in index], dtype="Int64"),
            "modalities": [", ".join(facts.get(client, {}).get("modalities", ())) for client in index],
            "labels": [facts.get(client, {}).get("labels") for client in index],
            "asked": [asked.get(client, 0) for client in index],
            "missing": [missing.get(client, 0) for client in index],
            "personal_score": pd.Series([accuracy.get(client) for client in index], index, dtype="float64"),
        },
        index=index,
    )


def _sections(table: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, own) for name, own in table.items() if isinstance(own, Mapping)]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(what)}</th><td style="text-align:left">{escape(value)}</td></tr>'
        for what, value in rows
    )
    return f"<table>{cells}</table>"
