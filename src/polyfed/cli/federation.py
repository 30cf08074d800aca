"""The verbs of a federation on several machines: the SuperLink of a server, the SuperNode of a device, the status."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from polyfed import deploy
from polyfed.cli.commands import AsJson, app
from polyfed.cli.output import print_json, show
from polyfed.cli.status_tables import status_tables
from polyfed.core.log_lines import LOG_FORMAT
from polyfed.deploy.status_client import ask


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


@app.command()
def superlink(
    credentials: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="ca.pem, server.pem, server.key, and the public key *.pub of every device.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where devices reach this server.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port for devices.")] = 9092,
    control_port: Annotated[
        int, typer.Option(min=1, max=65535, metavar="N", help="Port for `flwr`, on this machine only.")
    ] = 9093,
    database: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where it keeps its state. [default: DIR/link.db]")
    ] = None,
    metrics_port: MetricsPort = 0,
    status_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="N", help="Port for `polyfed status` from other machines; a token is needed."
        ),
    ] = 0,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Start a server's SuperLink: devices with a known key from anywhere, `flwr` from this machine only."""
    os.environ[LOG_FORMAT] = log_format.value
    ports = deploy.ServerPorts(host, port, control_port, metrics_port, status_port)
    deploy.run_superlink(credentials, ports, database)


@app.command()
def supernode(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server.", show_default=False)],
    root_certificates: Annotated[
        Path, typer.Option(metavar="ca.pem", help="Checks the server's certificate.", show_default=False)
    ],
    key: Annotated[
        Path,
        typer.Option(
            "--auth-supernode-private-key", "--key", metavar="FILE", help="This device's key.", show_default=False
        ),
    ],
    node_config: Annotated[
        str,
        typer.Option(metavar="CONFIG", help="Its data, number, modalities and policy.", show_default=False),
    ],
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="A free port of this machine.")] = 9094,
    metrics_port: MetricsPort = 0,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Start a device: it answers with the polyfed installed here, and runs no code that a server sends."""
    os.environ[LOG_FORMAT] = log_format.value
    deploy.run_supernode(superlink, root_certificates, key, node_config, port, metrics_port)


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
    told = ask(server, root_certificates, token)
    if as_json:
        print_json(told)
    else:
        show(status_tables(told))
