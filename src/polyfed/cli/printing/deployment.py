"""The output of `polyfed app`, of `polyfed check --node`, and of the verbs that let devices join."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from polyfed import deploy
from polyfed.cli.printing import tables
from polyfed.cli.printing.status_tables import job_facts, job_table
from polyfed.core.errors import RecipeError, command
from polyfed.core.messages import LABELS
from polyfed.core.system.files import RESULT
from polyfed.core.system.log_lines import escaped_lines
from polyfed.core.tree import SHARED
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.deploy.device.recipe_check import Inspection
from polyfed.deploy.server.jobs import LOG, WAIT_HOURS, Jobs
from polyfed.experiment.checks.check import fixes_of
from polyfed.privacy.egress.policy import EVERY
from polyfed.report import REPORT
from polyfed.report.text_layout import plain_table, stacked, titled

if TYPE_CHECKING:
    from polyfed.deploy.device.joining import Proposal


def run_locally(recipe: Path, folder: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    """Run a federation on this machine, and return its result and what to print."""
    return result_of(deploy.run_locally(recipe, folder))


def result_of(out: Path) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the result in a run folder and what to print of it."""
    result: dict[str, Any] = json.loads((out / RESULT).read_text())
    return result, [tables.result_table(result), Text(f"files in {out}, picture in {out / REPORT}")]


def enqueue(
    app: Path, credentials: Path, changes: Mapping[str, str], at: datetime | None, wait: float | None
) -> tuple[dict[str, Any], list[str]]:
    """Put a job into the queue, and return its record and what to print.

    Raises:
        RecipeError: the start is in the past; see also `queued_run.enqueue`.
    """
    from polyfed.deploy.server.hosting import serves  # only here: a plain install has no cryptography

    moment = 0.0 if at is None else at.timestamp()  # without a time zone, it is that of this machine
    if at is not None and moment < time.time() - 60:
        raise RecipeError(
            f"--at {at.isoformat()} is in the past, as this machine's clock says {datetime.now():%Y-%m-%dT%H:%M}"
        )
    job = deploy.enqueue(app, credentials, changes, moment, 3600 * (WAIT_HOURS if wait is None else wait))
    lines = [f"job {job.id} waits{_when(moment)}; the run will be in {job.out}"]
    if not serves(credentials):
        start = command("server", credentials)
        lines.append(f"no server uses these credentials now; it starts the job when it is there: {start}")
    lines.append(f"how it stands: {command('jobs', credentials)}")
    return asdict(job), lines


def _when(moment: float) -> str:
    return f" until {_local(moment)}" if moment > time.time() else ""


def _local(moment: float) -> str:
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


def log_of(credentials: Path, number: int) -> str:
    """Return the log of a job; "" before its first start.

    Raises:
        RecipeError: there is no such job.
    """
    jobs = Jobs.of_server(credentials)
    jobs.get(number)
    path = jobs.place(number) / LOG
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def jobs_of(credentials: Path, action: str | None, number: int) -> tuple[Any, list[RenderableType]]:
    """Do something with a job, or list all. Return what `polyfed jobs --json` prints, and what to print otherwise."""
    jobs = Jobs.of_server(credentials)
    if action is None:
        result = [jobs.facts(job) for job in jobs.all()]
        lines: list[RenderableType] = (
            [job_table(result)] if result else ["there are no jobs; `polyfed submit --queue` adds one"]
        )
        lines += [f"the record of job {one} is damaged: {jobs.place(one)}" for one in jobs.damaged()]
        return {"jobs": result, "damaged": jobs.damaged()}, lines
    job = jobs.get(number) if action == "show" else jobs.order(number, action)
    facts = jobs.facts(job)
    return facts, [job_facts(facts)] if action == "show" else [f"job {job.id} is {job.state}"]


def resume_command(recipe: Path, folder: Path) -> str:
    """The command that resumes an interrupted federation."""
    return command("app", folder, "--recipe", recipe, "--local")


@dataclass(frozen=True)
class Written:
    """What `polyfed app` wrote.

    Attributes:
        folder: the folder of the app.
        credentials: the folder of the credentials.
        warnings: what the app warns about.
        keys: the number of device keys that were asked for; None if no credentials were asked for.
        kept: whether the folder of the credentials had files before.
        new: the new files in this folder.
        lacking: whether no credentials were asked for, and the folder of the credentials holds no server certificate.
    """

    folder: Path
    credentials: Path
    warnings: Sequence[str]
    keys: int | None = None
    kept: bool = False
    new: Sequence[str] = ()
    lacking: bool = False

    @property
    def start(self) -> str:
        """The command that starts the app."""
        return command("submit", self.folder)

    def facts(self) -> dict[str, Any]:
        """The content that `app --json` prints."""
        facts = {"app": str(self.folder), "start": self.start, "warnings": list(self.warnings)}
        if self.lacking:
            return facts | {"credentials": None}
        if self.keys is None:
            return facts
        return facts | {"credentials": str(self.credentials), "new": list(self.new)}

    def lines(self) -> Iterator[str]:
        """What to print."""
        yield from (f"warning: {text}" for text in self.warnings)
        if self.lacking:
            yield f"app in {self.folder}; no credentials were asked for, and {self.credentials} holds no credentials"
            yield "to write a certificate of the server, repeat the command with --host NAME, its name or address"
            yield f"once a server uses the credentials, start the app with: {self.start}"
            return
        yield f"app in {self.folder}; start it with: {self.start}"
        if self.keys is None:
            yield f"the credentials in {self.credentials} are unchanged"
            return
        if self.kept:
            yield f"existing files in {self.credentials} are kept; new: {', '.join(self.new) or 'nothing'}"
        else:
            yield f"a server certificate and {self.keys} keys of devices, for trials, in {self.credentials}"
        yield f"put the public key *.pub of every device there, then: {command('server', self.credentials)}"


def write_app(recipe: Path, folder: Path, keys: int | None, hosts: Sequence[str]) -> Written:
    """Write an app and, if keys or hosts are given, credentials. Return what was written.

    Args:
        folder: the folder for the app. Credentials go to a folder beside it, which has the same name with
            `-credentials` added.
        keys: how many device keys to write, or None.
        hosts: names and addresses for the server's certificate.
    """
    credentials = folder.with_name(f"{folder.name}-credentials")
    warnings: list[str] = []
    deploy.write_app(recipe, folder, warnings.append)
    if keys is None and not hosts:
        return Written(folder, credentials, warnings, lacking=not (credentials / "server.pem").exists())
    before = {path.name for path in credentials.glob("*")}
    deploy.write_credentials(credentials, keys or 0, hosts)
    new = sorted(path.name for path in credentials.glob("*") if path.name not in before)
    return Written(folder, credentials, warnings, keys or 0, bool(before), new)


def device_tables(inspection: Inspection) -> Group:
    """Return tables that describe a device. They do not need the device to be running.

    They show the device's data, its policy, and what the policy allows a recipe to send.
    """
    node = inspection.node
    policy = plain_table("block", "to the server", "to its silo", left=3)
    for block, row in inspection.policy.table(node.held).items():
        policy.add_row(Text(block), *(", ".join(row[place]) or "nothing" for place in ("server", "silo")))
    crossing = plain_table("task", "message.field", "kind", "block", "to", "this device", left=6)
    for sent in inspection.planned:
        verdict = "allows" if sent.allowed else Text("REFUSES", "bold red")
        crossing.add_row(
            sent.task, f"{sent.message}.{sent.field}", sent.kind, Text(sent.block), sent.destination, verdict
        )
    fixes = fixes_of(inspection.refused, inspection.policy)
    parts: list[RenderableType] = [*_data(inspection), titled("May leave", policy)]
    if inspection.planned:
        parts.append(titled("The recipe would send", crossing))
    about = (*node.held, SHARED, LABELS, EVERY)
    parts += [
        Text(f"[egress.{row}] is about no modality here. It keeps a column or an array of this name out of all of them")
        for row in node.rules.egress
        if row not in about
    ]
    refused = ((row.kind, row.block, row.destination) for row in inspection.refused)
    parts += [Text(why, "yellow") for why in inspection.policy.explanations(refused)]
    parts += [Text(f"would be allowed by {fix}") for fix in fixes]
    parts += [Text(f"[limits] {line}") for line in inspection.limits]
    parts += [Text(f"[require] {line} (of the device)") for line in inspection.required]
    parts += [Text(line) for line in inspection.purposes]
    parts += [Text(f"would be refused by {why}", "bold red") for why in inspection.breaches]
    if inspection.unchecked:
        cure = f'--node \'data="mine.npz" client=0 modalities="..." policy="{node.policy}"\''
        why = f"NOT CHECKED: what the recipe would send, because {inspection.unchecked}. Give the device's data: {cure}"
        parts.append(Text(why, "bold red"))
    return stacked(*parts)


def proposal_parts(proposal: "Proposal") -> Iterator[RenderableType]:
    """Yield what the owner of a device reads before it joins. Texts of the server are escaped."""
    place = proposal.place
    yield Text(f"the server {proposal.address} is that of the token: authority {proposal.authority[:16]}...")
    yield Text(f"this device would be number {place.number}, {place.name}")
    yield device_tables(proposal.inspection)
    if (relay := proposal.inspection.node.relay) != NodeConfig.relay:
        yield Text(
            f"--relay {relay}: this server reads what the policy lets pass within the silo, as embeddings and ids"
        )
    if not place.recipe:
        yield Text("the server shows no recipe; whatever it runs later can send no more than this")
    yield Text("this policy is, or will be, a file of yours: change it before the device starts, if less should leave")
    yield from (Text(escaped_lines(note), "yellow") for note in proposal.notes)


def register_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the devices of a server as a table."""
    from polyfed.deploy.server.registration import moment

    table = plain_table("device", "name", "state", "token until", "joined", "key", left=6)
    for row in rows:
        number = "" if row["number"] is None else str(row["number"])
        times = moment(row["ends"]), moment(row["joined"])
        table.add_row(number, Text(row["name"]), row["state"], *times, row["key"])
    return table


def device_facts(inspection: Inspection) -> dict[str, Any]:
    """The content that `check --node --json` prints."""
    node, (trained, tested) = inspection.node, inspection.rows or (None, None)
    return {
        "client": None if inspection.rows is None else node.client,
        "rows": trained,
        "test_rows": tested,
        "shapes": inspection.shapes,
        "egress": inspection.policy.table(node.held),
        "limits": list(inspection.limits),
        "required": list(inspection.required),
        "purposes": list(inspection.purposes),
        "breaches": list(inspection.breaches),
        "planned": [asdict(row) for row in inspection.planned],
        "unchecked": inspection.unchecked,
    }


def _data(inspection: Inspection) -> Iterator[RenderableType]:
    if inspection.rows is None:
        yield Text(f"policy {inspection.node.policy} is valid", "bold")
        return
    node, (trained, tested) = inspection.node, inspection.rows
    table = plain_table("modality", "shape of a sample", left=2)
    for name, shape in inspection.shapes.items():
        table.add_row(Text(name), str(shape))
    head = f"client {node.client}: {trained:,} rows to train on, {tested:,} of its own to test on"
    yield titled(f"{head}, labels 0..{inspection.num_classes - 1}", table)
