"""The verbs that start a federation on several machines: the SuperLink of a server, the SuperNode of a device."""

from pathlib import Path
from typing import Annotated

import typer

from polyfed import deploy
from polyfed.cli.commands import app


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
) -> None:
    """Start a server's SuperLink: devices with a known key from anywhere, `flwr` from this machine only."""
    deploy.run_superlink(credentials, host, port, control_port, database)


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
) -> None:
    """Start a device: it answers with the polyfed installed here, and runs no code that a server sends."""
    deploy.run_supernode(superlink, root_certificates, key, node_config, port)
