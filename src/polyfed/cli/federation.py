"""The verbs of a deployment: start servers, devices and edges, let devices join, submit apps, see jobs, ask status."""

import os
import signal
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from polyfed.cli.application import HELP_OPTIONS, AsJson, Interrupted, app
from polyfed.cli.output import answer, print_json, show
from polyfed.core.errors import RecipeError, command
from polyfed.core.system.log_lines import LOG_FORMAT
from polyfed.core.system.stop_signals import handling, interrupt

if TYPE_CHECKING:
    from polyfed.deploy.device.joining import Proposal

START = "start"


class Startable(TyperGroup):
    """A verb with others below it, of which `start` need not be written: `polyfed server DIR`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `start` before the first word, unless this is the name of another verb."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [START, *args]
        return super().parse_args(ctx, args)


servers, devices, edges = (
    typer.Typer(name=name, help=about, cls=Startable, no_args_is_help=True, context_settings=HELP_OPTIONS)
    for name, about in (
        (
            "server",
            "The server of a federation. `polyfed server DIR` starts it; the others make it and let devices in.",
        ),
        ("device", "A device of a federation. `polyfed device FILE.toml` starts it, after `polyfed device join`."),
        ("edge", "The edge of a silo. `polyfed edge FILE.toml` starts it, after `polyfed edge join`."),
    )
)
app.add_typer(servers)
app.add_typer(devices)
app.add_typer(edges)

JsonError = Annotated[bool, typer.Option("--json", help="If it cannot start, print the error as JSON.")]
"""`--json` for a verb that runs until it is stopped, and therefore has no result to print."""


class LogFormat(StrEnum):
    """The format of log lines."""

    text = "text"
    json = "json"


LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", envvar=LOG_FORMAT, help="Log lines for people, or JSON lines for programs.")
]
MetricsPort = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="N", help="Port for health and Prometheus metrics, on this machine only. 0: none."
    ),
]

StatusPort = Annotated[
    int,
    typer.Option(
        min=0, max=65535, metavar="N", help="Port for `polyfed status` from other machines; a token is needed."
    ),
]


Credentials = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="ca.pem, server.pem, server.key, and the public key *.pub of every device.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Where devices reach this server.")]
Port = Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port for devices.")]


MOMENTS = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M%z", "%Y-%m-%d"]
"""How the start of a job is written; without a time zone, it is that of this machine."""


@app.command("app")
def write_app(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the app.", show_default=False)],
    recipe: Annotated[Path, typer.Option(metavar="RECIPE.toml", help="The recipe.", show_default=False)],
    local: Annotated[
        bool, typer.Option("--local", help="Also run it on this machine: a server, and a process for each client.")
    ] = False,
    keys: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Write a server certificate and N keys of devices to DIR-credentials."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="The certificate is for this name or address; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an app for a recipe. `polyfed submit` runs the app; see `polyfed docs deploy`."""
    from polyfed.cli.printing import deployment

    if not local:
        written = deployment.write_app(recipe, dir, keys, hosts or [])
        answer(written.facts(), *written.lines(), as_json=as_json)
        return
    try:
        result, shown = deployment.run_locally(recipe, dir)
    except KeyboardInterrupt:
        again = deployment.resume_command(recipe, dir)
        raise Interrupted(f"all processes have ended; resume with: {again}") from None
    answer(result, *shown, as_json=as_json)


@app.command()
def submit(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the app.", show_default=False)],
    credentials: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The credentials of this machine's server. [default: DIR-credentials]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the run. [default: DIR/run]")] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's own rows. [default: those of the app]")
    ] = None,
    queue: Annotated[
        bool, typer.Option("--queue", help="Return at once: the server runs the app as a job; see `polyfed jobs`.")
    ] = False,
    at: Annotated[
        datetime | None,
        typer.Option(formats=MOMENTS, metavar="TIME", help="With --queue: when the job starts, as 2027-03-31T22:00."),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="HOURS", help="With --queue: how long too few devices are waited for. [default: 1]"
        ),
    ] = None,
    log_format: LogFormatOption = LogFormat.text,
    as_json: AsJson = False,
) -> None:
    """Run an app to its end, with the devices of this machine's server.

    After Ctrl-C or a kill, the same command continues the run.
    """
    from polyfed import deploy
    from polyfed.cli.printing import deployment

    os.environ[LOG_FORMAT] = log_format.value
    given = {"out": out, "data": data}
    changes = {key: str(path.expanduser().absolute()) for key, path in given.items() if path is not None}
    beside = dir.with_name(f"{dir.name}-credentials") if credentials is None else credentials
    if queue:
        made, lines = deployment.enqueue(dir, beside, changes, at, wait)
        answer(made, *lines, as_json=as_json)
        return
    if at is not None or wait is not None:
        raise RecipeError("--at and --wait are for jobs of the server: add --queue")
    try:
        with handling(interrupt, signal.SIGTERM):
            done = deploy.submit(dir, beside, changes)
    except KeyboardInterrupt:
        raise Interrupted("the run is stopped; the same command continues it") from None
    result, shown = deployment.result_of(done)
    answer(result, *shown, as_json=as_json)


@servers.command(START)
def server(
    credentials: Credentials,
    host: Host = "0.0.0.0",
    port: Port = 9092,
    metrics_port: MetricsPort = 0,
    status_port: StatusPort = 0,
    jobs: Annotated[int, typer.Option(min=0, metavar="N", help="How many jobs of the queue run side by side.")] = 1,
    log_format: LogFormatOption = LogFormat.text,
    as_json: JsonError = False,
) -> None:
    """Start a server. Devices with a known key can connect from anywhere; `polyfed submit` runs an app with them."""
    from polyfed import deploy

    os.environ[LOG_FORMAT] = log_format.value
    deploy.run_server(credentials, deploy.ServerPorts(host, port, metrics_port, status_port), jobs)


class JobAction(StrEnum):
    """What `polyfed jobs` does with one job."""

    show = "show"
    logs = "logs"
    pause = "pause"
    resume = "resume"
    cancel = "cancel"


@app.command()
def jobs(
    credentials: Annotated[
        Path, typer.Argument(metavar="DIR", help="The credentials of the server.", exists=True, file_okay=False)
    ],
    action: Annotated[
        JobAction | None, typer.Argument(help="What to do with one job. [default: list all]", show_default=False)
    ] = None,
    number: Annotated[int | None, typer.Argument(metavar="[ID]", help="Number of the job.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs of this machine's server, or look after one: `polyfed jobs DIR cancel 3`.

    A paused or cancelled job costs devices nothing from the next second on. A paused one can be resumed exactly, and so
    can one that has failed.
    """
    from polyfed.cli.printing import deployment

    if (action is None) != (number is None):
        raise RecipeError(f"polyfed jobs DIR ACTION ID: ACTION is {', '.join(JobAction)}, and ID the number of a job")
    if action is JobAction.logs:
        told = deployment.log_of(credentials, number or 0)
        answer({"job": number, "log": told}, *told.splitlines(), as_json=as_json)
        return
    facts, parts = deployment.jobs_of(credentials, None if action is None else action.value, number or 0)
    answer(facts, *parts, as_json=as_json)


@devices.command(START)
def device(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.toml", help="The server, and the data, key and policy of each device.")
    ],
    metrics_port: MetricsPort = 0,
    log_format: LogFormatOption = LogFormat.text,
    as_json: JsonError = False,
) -> None:
    """Start one or more devices. They use the polyfed that is installed here, and run no code that a server sends."""
    from polyfed import deploy

    os.environ[LOG_FORMAT] = log_format.value
    deploy.run_device(file, metrics_port)


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the server.", show_default=False)]
Hours = Annotated[float, typer.Option(metavar="H", help="How long a token is valid.")]


@servers.command("init")
def server_init(
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the server.", show_default=False)],
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host", metavar="NAME", help="Where devices reach the server; may be repeated.", show_default=False
        ),
    ],
    number: Annotated[int, typer.Option("--devices", min=0, max=10_000, metavar="N", help="How many tokens.")] = 0,
    names: Annotated[
        list[str] | None, typer.Option("--name", metavar="NAME", help="A token for a device; may be repeated.")
    ] = None,
    port: Port = 9092,
    hours: Hours = 24.0,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE.toml", help="A recipe that owners see before their device joins.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the authority and the certificate of a server, and a join token for each device."""
    from polyfed import deploy

    if number and names:
        raise RecipeError(f"--devices {number} and --name: give one of them, as each --name is a device")
    with deploy.needing_extra("a server"):
        from polyfed.deploy.server import registration
    made = registration.begin(dir, hosts, port, names or [""] * number, hours, recipe)
    facts = {"server": str(dir), "start": registration.start_of(dir), "tokens": [one.facts() for one in made]}
    head = (f"the authority and the certificate are in {dir}", f"start the server: {facts['start']}")
    answer(facts, *head, *registration.lines(dir, made, hours), as_json=as_json)


@servers.command("token")
def server_token(
    dir: Folder,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the device. [default: device-NUMBER]")] = "",
    number: Annotated[
        int | None, typer.Option(metavar="N", help="Its client number. [default: the lowest free one of the server]")
    ] = None,
    hours: Hours = 24.0,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where devices reach the server, if changed.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Make none, and list the devices and their tokens.")] = False,
    withdrawn: Annotated[str, typer.Option("--revoke", metavar="WHO", help="Revoke a device or its token.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a join token for one more device; or list all, or revoke one."""
    from polyfed import deploy
    from polyfed.cli.printing.deployment import register_table

    with deploy.needing_extra("a server"):
        from polyfed.deploy.server import registration
    if withdrawn:
        _revoked(dir, withdrawn, as_json=as_json)
    elif listed:
        rows = registration.devices(dir)
        answer({"devices": rows}, register_table(rows), registration.summary(rows), as_json=as_json)
    else:
        made = registration.issue(dir, name, number, hours, address)
        answer(made.facts(), *registration.lines(dir, [made], hours), as_json=as_json)


@servers.command("host")
def server_host(
    dir: Folder,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Further names or addresses.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Let devices reach the server under further names. They keep their ca.pem, keys and tokens; the server runs on."""
    from polyfed import deploy

    with deploy.needing_extra("a server"):
        from polyfed.deploy.server import registration
    new, token = registration.add_hosts(dir, names)
    told = f"the certificate in {dir} is now also for {', '.join(new)}" if new else "it is for these names already"
    answer({"server": str(dir), "added": new}, told, f"tokens with the name: {token}", as_json=as_json)


@servers.command("revoke")
def server_revoke(
    dir: Folder,
    who: Annotated[str, typer.Argument(metavar="NAME|NUMBER", help="The device.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Take a device's key away, or withdraw its token. It is refused from its next call on; the server runs on."""
    _revoked(dir, who, as_json=as_json)


def _revoked(dir: Path, who: str, *, as_json: bool) -> None:
    from polyfed import deploy

    with deploy.needing_extra("a server"):
        from polyfed.deploy.server import registration
    with registration.registered(dir) as register:
        found = register.revoke(who)
    facts = {"revoked": found if isinstance(found, str) else found.facts()}
    answer(facts, registration.told_of(found), as_json=as_json)


@devices.command("join")
def device_join(
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="From `polyfed server init`; - reads it.", show_default=False)
    ],
    data: Annotated[
        Path, typer.Option(metavar="FILE", help="An .npz file, or a folder of .npy files.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files of the device.")] = Path(),
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A policy of yours. [default: one is written for the data]")
    ] = None,
    modalities: Annotated[
        str, typer.Option(metavar="A,B", help="Arrays to take part with. [default: those that polyfed finds]")
    ] = "",
    label: Annotated[str, typer.Option(metavar="NAME", help="The array of the labels, if it has another name.")] = "",
    silo: Annotated[int, typer.Option(min=-1, metavar="N", help="Number of the device's silo. -1: none.")] = -1,
    relay: Annotated[
        str, typer.Option(metavar="WHO", help="Who may pass what it sends within its silo: edge, server-sees, refused.")
    ] = "refused",
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for what the device keeps. [default: polyfed-state beside the data]"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Join without a question.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make this device's key and policy, and join the server of a token after your yes. Nothing is overwritten."""
    from polyfed import deploy

    with deploy.needing_extra("a device"):
        from polyfed.deploy.device import joining
    word = sys.stdin.readline() if token == "-" else token
    policy = None if policy is None else policy.expanduser()
    wanted = joining.Wanted(
        data.expanduser(), folder.expanduser(), policy, joining.names_in(modalities), label.strip(), silo, relay, state
    )
    made = joining.join(word, wanted, lambda proposal: _agrees(proposal, yes=yes, quiet=as_json))
    if made is None:
        typer.echo("polyfed: not joined. Nothing is left of it, and the token can still be used", err=True)
        raise typer.Exit(1)
    facts = {"client": made.number, "server": made.address, "file": str(made.file), "written": list(made.written)}
    facts["start"] = joining.start_of(made)
    lines = (f"device {made.number} has joined {made.address}; new: {', '.join(made.written)}",)
    answer(facts, *lines, f"the key stays here. Start the device: {facts['start']}", as_json=as_json)


@devices.command("renew")
def device_renew(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.toml", help="That of `polyfed device` or `polyfed edge`.", show_default=False),
    ],
    client: Annotated[
        int | None, typer.Option(metavar="N", help="Only this device. [default: all of the file]", show_default=False)
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The key, if FILE.toml names a copy of it.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replace the key of a device by a new one, while the device runs. The old key holds until the new one is used."""
    from polyfed import deploy

    with deploy.needing_extra("a device"):
        from polyfed.deploy.device import joining
    made = joining.renew(file, client, key)
    facts = [{"client": one.client, "key": str(one.key), "before": one.before, "now": one.now} for one in made]
    lines = (f"client {one.client}: {one.now} has replaced {one.before}, which ended; {one.key}" for one in made)
    answer({"renewed": facts}, *lines, as_json=as_json)


def _agrees(proposal: "Proposal", *, yes: bool, quiet: bool) -> bool:
    """Show what would leave the device, and return whether its owner says yes."""
    from polyfed.cli.printing.deployment import proposal_parts

    if not (quiet and yes):
        show(*proposal_parts(proposal))
    if yes:
        return True
    if not sys.stdin.isatty():
        raise RecipeError(
            "nobody can answer here, because standard input is no terminal. Read what would leave, then join with --yes"
        )
    place = proposal.place
    return typer.confirm(f"Join {proposal.address} as device {place.number}, {place.name}?", err=True)


@edges.command("join")
def edge_join(
    token: Annotated[
        str, typer.Argument(metavar="TOKEN", help="From the federation's server; - reads it.", show_default=False)
    ],
    dir: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the edge.", show_default=False)],
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host",
            metavar="NAME",
            help="Where the silo's devices reach the edge; may be repeated.",
            show_default=False,
        ),
    ],
    number: Annotated[
        int,
        typer.Option("--devices", min=1, max=10_000, metavar="N", help="How many the silo has.", show_default=False),
    ],
    port: Port = 9093,
    hours: Hours = 24.0,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What of the silo may leave for the server. [default: the default policy]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Join the server of a token as the edge of a silo, and make a join token for each device of the silo."""
    from polyfed import deploy

    with deploy.needing_extra("an edge"):
        from polyfed.deploy.edge import joining
        from polyfed.deploy.server import registration
    word = sys.stdin.readline() if token == "-" else token
    made = joining.join(word, joining.Silo(dir.expanduser(), hosts, number, port, hours, policy))
    facts = {"silo": made.silo, "server": made.address, "file": str(made.file)}
    facts |= {"start": command("edge", made.file), "tokens": [one.facts() for one in made.tokens]}
    head = (f"the edge of silo {made.silo} has joined {made.address}", f"start the edge: {facts['start']}")
    answer(facts, *head, *registration.lines(made.credentials, made.tokens, hours), as_json=as_json)


@edges.command(START)
def edge(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.toml", help="The server, the silo, and the edge's key, certificate and policy."),
    ],
    metrics_port: MetricsPort = 0,
    log_format: LogFormatOption = LogFormat.text,
    as_json: JsonError = False,
) -> None:
    """Start the edge of a silo: a server for the silo's devices, whose embeddings and sample ids stay there."""
    from polyfed import deploy

    os.environ[LOG_FORMAT] = log_format.value
    deploy.run_edge(file, metrics_port)


@app.command()
def status(
    server: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's --status-port.", show_default=False)],
    root_certificates: Annotated[
        Path, typer.Option(metavar="ca.pem", help="Checks the server's certificate.", show_default=False)
    ],
    token: Annotated[
        Path, typer.Option(metavar="FILE", help="status.token of the server's credentials.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Print what a server is doing: its devices, its runs, the round, and who did not answer."""
    from polyfed.cli.printing.status_tables import status_tables
    from polyfed.deploy.server.status_client import ask

    told = ask(server, root_certificates, token)
    if as_json:
        print_json(told)
    else:
        show(status_tables(told))
