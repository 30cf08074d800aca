"""The receipts of a silo: the edge asks its devices for theirs, signs its own, and passes all on to the server."""

from pathlib import Path
from typing import Any, get_type_hints

from polyfed.core.errors import BadReply, DataError
from polyfed.core.system.files import AUDIT
from polyfed.deploy.device.memory.local_states import end
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.deploy.edge.edge_file import EdgeConfig
from polyfed.deploy.faults import log_problem
from polyfed.deploy.handlers import policy_digest
from polyfed.deploy.server.countersignatures import DEVICES, SIGN_SECONDS, device_receipts
from polyfed.engines.protocol import SIGNED, to_sign
from polyfed.engines.queued import QueueTransport
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.edge_receipts import Edge, edge_receipt, within
from polyfed.privacy.egress.audit_log.log import AuditLog
from polyfed.privacy.egress.audit_log.receipts import log_rows, start_of

PATIENCE = 0.7
"""The edge waits for its devices for this share of `SIGN_SECONDS`, so that its answer reaches the server in time."""


def messages_to_edges(recipe: Recipe) -> list[str]:
    """Return the names of the messages that an edge gets from the server: one for each kind of part."""
    method = recipe.algorithm
    return sorted({get_type_hints(getattr(method, part))["got"].__name__ for part in method.silo_parts})


def countersigned(edge: EdgeConfig, recipe: Recipe, packet: Packet, transport: QueueTransport) -> Packet:
    """Sign what passed between the silo and the server, and pass on what its devices have signed.

    Args:
        transport: carries packets to the devices, which have enrolled. The run has ended for them.

    Raises:
        BadReply: the packet does not say which ledger to sign, or is for another silo.
        DataError, CheckpointError: the edge's audit log is missing or damaged.
    """
    run, silo, unanswered = to_sign(packet.header)
    if silo != edge.silo:
        raise BadReply(f"is for the edge of silo {silo}, this is that of silo {edge.silo}")
    log, received = AuditLog(edge.node.folder), messages_to_edges(recipe)
    devices = {client: transport.device_of(node) for client, node in transport.node_of.items()}
    signer = Edge(silo, received, devices)
    try:
        result: dict[str, Any] = edge_receipt(log, run, signer, unanswered, policy_digest(edge.node))
        known = within(_rows(log.folder, run), run, received)
    except ValueError as error:
        raise DataError(f"{log.folder / AUDIT} cannot be signed: {error}") from None
    seconds = PATIENCE * SIGN_SECONDS
    told = device_receipts(known, run, transport, seconds, log_problem, left_out=unanswered)
    end(DeviceStore(log.folder), run, silo)
    return Packet({"verdict": SIGNED, **result, DEVICES: told})


def _rows(folder: Path, run: str) -> list[dict[str, Any]]:
    path = folder / AUDIT
    return log_rows(path, start_of(path, run)) if path.exists() else []
