"""What a SuperLink knows about its SuperNodes and runs: counts, numbers and statuses."""

from typing import Any

from flwr.supercore.constant import NodeStatus

LATEST = 10
"""How many runs are listed, the latest first."""


def link_facts(state: Any) -> dict[str, Any]:
    """The SuperNodes and the latest runs.

    Args:
        state: the SuperLink's state.

    Returns:
        `nodes`: how many are `registered` and how many are `online`; `runs`: `id` and `status` of each.
    """
    nodes = [node for node in state.get_node_info() if node.status != NodeStatus.UNREGISTERED]
    online = sum(node.status == NodeStatus.ONLINE for node in nodes)
    runs = state.get_run_info(order_by="pending_at", ascending=False, limit=LATEST)
    told = [
        {"id": str(run.run_id), "status": ":".join(filter(None, (run.status.status, run.status.sub_status)))}
        for run in runs
    ]
    return {"nodes": {"registered": len(nodes), "online": online}, "runs": told}
