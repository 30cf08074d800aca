"""The verbs of a deployment: write and submit apps, start servers, devices and edges, look after jobs, ask a status."""

import os
import signal
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.application import AsJson, Interrupted, app
from polyfed.cli.output import answer, print_json, show
from polyfed.core.errors import RecipeError
from polyfed.core.system.log_lines import LOG_FORMAT
from polyfed.core.system.stop_signals import handling, interrupt

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


@app.command()
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


@app.command()
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


@app.command()
def edge(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE.toml", help="The server, the silo, and the edge's key, certificate and policy."),
    ],
    log_format: LogFormatOption = LogFormat.text,
    as_json: JsonError = False,
) -> None:
    """Start the edge of a silo: a server for the silo's devices, whose embeddings and sample ids stay there."""
    from polyfed import deploy

    os.environ[LOG_FORMAT] = log_format.value
    deploy.run_edge(file)


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
