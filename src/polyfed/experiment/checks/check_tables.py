"""The tables that `polyfed check` prints: clients, blocks and their sizes, and the data that can leave the clients."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from polyfed.core.errors import counted as in_words
from polyfed.experiment.checks import egress_tables as crossing
from polyfed.experiment.checks.check_result import CheckResult
from polyfed.privacy.differential.guarantee import number
from polyfed.report.formatting import bytes_of, counted
from polyfed.report.text_layout import plain_table, stacked, titled


def _what(num: int, task: dict[str, Any]) -> str:
    """Return the number of classes, labels, targets or levels with its noun, such as `3 classes`."""
    words = {
        "multi-label": ("label each", "labels each"),
        "regression": ("target each", "targets each"),
        "ordinal": ("level", "levels"),
    }
    return in_words(num, *words.get(task["name"], ("class", "classes")))


def _rows(num: int, use: str) -> str:
    return counted(num, f"{use} row").replace(str(num), f"{num:,}", 1) if num else f"no {use} rows"


def _task(task: dict[str, Any]) -> str:
    """Return a sentence that states the task."""
    by = "guessed from the labels, [task] decides" if task["guessed"] else "by [task]"
    return f"task: {task['name']}, {by}; the model has {counted(task['outputs'], 'output')}"


def check_tables(check: CheckResult) -> Group:
    """The tables of a check: clients, blocks and their sizes, and the data that can leave the clients."""
    recipe = check.recipe.table()
    name, rounds = recipe["algorithm"]["name"], counted(recipe["rounds"], "round")
    head = f"{name} on {recipe['data']['name']}: {rounds}, seed {recipe['seed']}"
    data = check.facts["data"]
    what = _what(data["classes"], check.facts["task"])
    rows = (
        f"{data['rows']:,} rows of {what}; the server holds {_rows(data['test_rows'], 'test')} and "
        f"{_rows(data['validation_rows'], 'validation')}"
    )
    return stacked(
        Text(head, "bold"),
        Text(rows),
        Text(_task(check.facts["task"])),
        *([_sentences("About the data", check.guesses)] if check.guesses else []),
        _clients(check.facts),
        *_each_client(check.facts),
        *_missing_rows(check.facts),
        _blocks(check.facts),
        crossing.crossing_table(check),
        *crossing.remarks(check),
        crossing.in_short(check),
        *_privacy(check),
        *_node_needs(check),
        *_links(check),
        *crossing.failures(check),  # at the end, so that users do not overlook it
    )


def _privacy(check: CheckResult) -> Iterator[Group]:
    """The guarantee of differential privacy: a table with a row per block and kind, and sentences that explain it."""
    if check.privacy is None:
        return
    table = plain_table("block", "kind", "epsilon", left=2)
    for block, kinds in check.privacy["blocks"].items():
        for kind, value in kinds.items():
            table.add_row(Text(block), kind, Text("NOT PROTECTED", "bold red") if value is None else number(value))
    yield Group(titled("Differential privacy", table), *(Text(f"{text}.") for text in check.promises))


def _node_needs(check: CheckResult) -> Iterator[Group]:
    """What each node of a cluster needs, if the recipe names one."""
    if check.node_needs:
        yield _sentences("Each node of the cluster needs", check.node_needs)


def _links(check: CheckResult) -> Iterator[Group]:
    """By which rates the server of a deployment schedules."""
    if check.links:
        yield _sentences("Measured links", check.links)


def _sentences(title: str, sentences: Sequence[str]) -> Group:
    table = plain_table("", left=1)
    for sentence in sentences:
        table.add_row(Text(sentence))
    return titled(title, table)


def _clients(facts: dict[str, Any]) -> Group:
    shown, total = facts["clients"], facts["num_clients"]
    title = f"{total:,} clients" if len(shown) == total else f"{total:,} clients, the first {len(shown):,} of them"
    table = plain_table("modalities", "clients", "rows", "rows a client: least", "median", "most")
    groups: dict[tuple[str, ...], list[int]] = {}
    for client in shown:
        groups.setdefault(tuple(client["modalities"]), []).append(client["rows"])
    for held, rows in sorted(groups.items(), key=lambda item: -len(item[1])):
        numbers = (len(rows), sum(rows), min(rows), round(statistics.median(rows)), max(rows))
        table.add_row(Text(" + ".join(held) or "none"), *(f"{number:,}" for number in numbers))
    return titled(title, table)


MOST_CLIENTS = 20
"""With more clients than this, no table has a line for each, and that of missing modalities has quantiles."""


def _each_client(facts: dict[str, Any]) -> Iterator[Group]:
    """A line for each of a few clients: its modalities, its rows, and how many have each label."""
    shown = facts["clients"]
    if not 1 < len(shown) == facts["num_clients"] <= MOST_CLIENTS:
        return
    names = facts["data"].get("class_names") or [str(number) for number in range(facts["data"]["classes"])]
    counted_labels = names if len(names) <= MOST_LABELS and all("labels" in one for one in shown) else []
    table = plain_table("client", "modalities", "rows", *map(str, counted_labels), left=2)
    for one in shown:
        labels = [f"{count:,}" for count in one["labels"]] if counted_labels else []
        table.add_row(Text(_name(one)), Text(" + ".join(one["modalities"]) or "none"), f"{one['rows']:,}", *labels)
    yield titled("Training rows of each client", table)


def _name(client: Mapping[str, Any]) -> str:
    """The name of a client, or its number if the data has no names."""
    return str(client.get("name", client["id"]))


MOST_LABELS = 8
"""With more classes than this, the table of clients has no columns of labels."""


def _missing_rows(facts: dict[str, Any]) -> Iterator[Group]:
    """The share of rows that lack each modality, by client, if some rows lack one."""
    parts = [
        ("training rows", "missing_rows", facts["clients"]),
        ("own test rows", "missing_test_rows", facts["clients"]),
        ("server's test rows", "missing_test_rows", [facts["data"]]),
        ("server's validation rows", "missing_validation_rows", [facts["data"]]),
    ]
    given = [(title, [one for one in held if one.get(entry)], entry) for title, entry, held in parts]
    names = dict.fromkeys(name for _, held, entry in given for one in held for name in one[entry])
    if not names:
        return
    table = plain_table("rows that lack the modality", *names, left=1)
    for title, held, entry in given:
        if not held:
            continue
        if held == [facts["data"]]:
            table.add_row(title, *(_share([held[0][entry].get(name)]) for name in names))
            continue
        if entry == "missing_rows":
            table.add_row(f"{title}, all clients", *(_share([_over(held, name)]) for name in names))
        if len(held) <= MOST_CLIENTS:
            for one in held:
                row = Text(f"{title}, client {_name(one)}")
                table.add_row(row, *(_share([one[entry].get(name)]) for name in names))
        else:
            for word, pick in (("least", min), ("median", statistics.median), ("most", max)):
                table.add_row(
                    f"{title} of a client, {word}",
                    *(_share([one[entry].get(name) for one in held], pick) for name in names),
                )
    yield titled("Missing modalities", table)


def _over(held: Sequence[dict[str, Any]], name: str) -> float | None:
    """The share over the training rows of all clients that hold the modality, or None if no client does."""
    own = [(one["missing_rows"][name], one["rows"]) for one in held if name in one["missing_rows"]]
    total = sum(rows for _, rows in own)
    return sum(share * rows for share, rows in own) / total if total else None


def _share(shares: Sequence[float | None], pick: Callable[[list[float]], float] = min) -> str:
    """The chosen one of these shares, in per cent. A dash stands for clients that do not hold the modality."""
    known = [share for share in shares if share is not None]
    return f"{100 * pick(known):.1f} %" if known else "-"


def _blocks(facts: dict[str, Any]) -> Group:
    frozen = facts["frozen"].get("parameters", {})
    table = plain_table("block", "bytes", *(["frozen parameters"] if frozen else []))
    for block, size in facts["blocks"].items():
        table.add_row(Text(block), bytes_of(size), *([f"{frozen.get(block, 0):,}"] if frozen else []))
    return titled("Blocks of the model", table)
