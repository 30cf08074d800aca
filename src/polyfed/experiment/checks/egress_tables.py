"""Shows which data may leave the clients: in a table by modality, kind and destination, and in short sentences."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group
from rich.text import Text

from polyfed.core.messages import KINDS, LABELS
from polyfed.core.tree import SHARED
from polyfed.experiment.checks.check_result import CheckResult, Planned
from polyfed.experiment.running.column_statistics import SET_UP
from polyfed.report.formatting import bytes_of
from polyfed.report.text_layout import plain_table, titled

PLURALS = {"raw": "raw samples", "statistic": "statistics", "ids": "sample ids"}
"""The kinds whose name in a sentence differs from their name in a table."""

Carrier = tuple[str, str]
"""(task, message.field)"""


def crossing_table(check: CheckResult) -> Group:
    """Return a table by modality, kind and destination: bytes, message fields, the policy's verdict."""
    table = plain_table("of", "kind", "to", "bytes a reply", "in (task)", "policy", left=6)
    order = [*grouped(check.planned)]
    apart = [grouped(row for row in check.planned if row.masked is masked) for masked in (True, False)]
    groups = sorted((item for part in apart for item in part.items()), key=lambda item: order.index(item[0]))
    for (block, kind, destination), rows in groups:
        table.add_row(
            Text(block),
            f"{kind}, masked" if rows[0].masked else kind,
            destination,
            size(rows, known=not check.remarks),
            Text(carriers((row.task, f"{row.message}.{row.field}") for row in rows)),
            "allowed" if rows[0].allowed else Text("REFUSED", "bold red"),
        )
    return titled("Can cross", table)


def in_short(check: CheckResult) -> Group:
    """Return a sentence for each modality, for the shared block, for labels, and for what no message carries."""
    table = plain_table("", "", left=2)
    blocks = dict.fromkeys([*check.facts["egress"], *(row.block for row in check.planned)])
    for block in blocks:
        table.add_row(Text(f"{block}:"), Text(sentence([r for r in check.planned if r.block == block], check)))
    for place, text in enumerate(check.not_in_ledger):
        table.add_row("" if place else "outside messages:", Text(text, "yellow"))
    return titled("In short", table)


def sentence(rows: Sequence[Planned], check: CheckResult) -> str:
    """Return a sentence about one block: what may leave, what may leave only after round 1, and what is refused."""
    early = [row for row in rows if row.task == SET_UP]
    if early and early[0].allowed:
        said = ", ".join(row.field for row in early)
        rest = sentence([row for row in rows if row.task != SET_UP], check)
        return f"before the first round, statistics of {said}; then {rest}"
    groups = grouped(rows)
    allowed = {place: group for place, group in groups.items() if group[0].allowed}
    first = {place for place, group in allowed.items() if check.remarks or any(row.in_dry_run for row in group)}
    parts = [_may_leave({place[1:] for place in first}, masked=any(row.masked for row in rows))]
    if clear := dict.fromkeys(row.message for row in rows if row.allowed and not row.masked):
        parts += [f"not masked: {', '.join(clear)}"] if any(row.masked for row in rows) else []
    if later := [kind for _, kind, _ in allowed.keys() - first]:
        parts.append(f"not in a first round, but perhaps: {_listed(later)}")
    if refused := [kind for _, kind, _ in groups.keys() - allowed]:
        parts.append(f"the policy refuses: {_listed(refused)}")
    return "; ".join(parts)


def _may_leave(places: set[tuple[str, str]], *, masked: bool = False) -> str:
    to = {way: sorted((k for k, w in places if w == way), key=KINDS.index) for way in ("server", "silo")}
    if not places:
        return "nothing"
    if not to["silo"]:
        hidden = ", masked: the server reads only sums" if masked else ""
        only = "parameters only" if to["server"] == ["parameters"] else f"{_listed(to['server'])} may leave"
        return f"{only}{hidden}"
    inside = f"{_listed(to['silo'])} may go to the silo's edge"
    return f"{inside}, {_listed(to['server'])} to the server" if to["server"] else f"{inside}, nothing to the server"


def grouped(rows: Iterable[Planned]) -> dict[tuple[str, str, str], list[Planned]]:
    """Rows by (block, kind, destination): modalities first, then `shared`, then labels; kinds ordered as in `KINDS`."""
    listed = list(rows)
    order = [*dict.fromkeys(row.block for row in listed if row.block not in (SHARED, LABELS)), SHARED, LABELS]
    groups: dict[tuple[str, str, str], list[Planned]] = {}
    for row in sorted(listed, key=lambda row: (order.index(row.block), KINDS.index(row.kind), row.destination)):
        groups.setdefault((row.block, row.kind, row.destination), []).append(row)
    return groups


def size(rows: Sequence[Planned], *, known: bool = True) -> str:
    """Return the size of the largest reply of a group, as text.

    Args:
        rows: the message parts in one of the groups that `grouped` returns.
        known: whether the dry run succeeded. If it failed, sizes may be unknown.
    """
    totals: dict[str, tuple[float, int]] = {}
    for row in rows:
        if row.in_dry_run or not known:
            per_row, fixed = totals.get(row.task, (0.0, 0))
            totals[row.task] = (per_row + row.bytes_per_row, fixed + (row.bytes or 0))
    if not totals:
        return "none in a first round"
    per_row, fixed = max(totals.values())
    if not (per_row or fixed) and not known:
        return "not known"
    parts = [bytes_of(fixed)] if fixed or not per_row else []
    return " + ".join([*parts, *([f"{bytes_of(per_row)} a row"] if per_row else [])])


def carriers(rows: Iterable[Carrier]) -> str:
    """List fields with the tasks that send them, as in `Report.loss, num_rows (explore, train)`.

    >>> carriers([("explore", "Report.loss"), ("train", "Report.loss"), ("train", "Report.num_rows")])
    'Report.loss (explore, train), Report.num_rows (train)'
    """
    tasks: dict[str, list[str]] = {}
    for task, field in rows:
        tasks.setdefault(field, []).append(task)
    fields: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for path, senders in tasks.items():
        message, _, field = path.partition(".")
        fields.setdefault((message, tuple(dict.fromkeys(senders))), []).append(field)
    return ", ".join(f"{message}.{', '.join(names)} ({', '.join(who)})" for (message, who), names in fields.items())


def remarks(check: CheckResult) -> Iterator[Text]:
    """Yield notes below the table: the source of the sizes, what a field reveals, and how to allow refused data."""
    yield Text(
        "Bytes are from the dry run of a first round on a few rows of a few clients; of several tasks, the largest.",
        "dim",
    )
    if secure := check.recipe.algorithm.secure_aggregation:
        yield Text(
            "masked: the server reads only sums over the clients of a request that have the block, at least "
            f"{secure.min_clients}. It reads no masked field of a single client ([secure_aggregation])"
        )
    if check.private:
        kept = ", ".join(f"{block} ({bytes_of(size)})" for block, size in check.private.items())
        yield Text(
            f"private, so kept at every client and never sent: {kept}. Only a client that has trained can predict, so "
            "the model serves nobody outside training"
        )
    for rank, sizes in check.facts.get("ranks", {}).items():
        own = ", ".join(f"{block} {bytes_of(size)}" for block, size in sizes.items())
        yield Text(f"parameters of a client of LoRA rank {rank}: {own}")
    revealed: dict[tuple[str, str], list[str]] = {}
    for row in check.planned:
        if row.tells:
            revealed.setdefault((row.message, row.tells), []).append(row.field)
    for (message, what), names in revealed.items():
        yield Text(f"{message}.{', '.join(dict.fromkeys(names))} tells {what}", "yellow")
    yield from (Text(reason, "yellow") for reason in check.why)
    yield from (Text(f"would be allowed by {fix}") for fix in check.fixes)


def failures(check: CheckResult) -> Iterator[Text]:
    """Yield why the dry run failed. A run may fail in the same way."""
    yield from (Text(remark, "bold red") for remark in check.remarks)


def _listed(kinds: Iterable[str]) -> str:
    words = [PLURALS.get(kind, kind) for kind in sorted(set(kinds), key=KINDS.index)]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
