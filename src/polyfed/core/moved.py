"""Where modules of earlier versions are now, for scripts that still import them by their old name."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MODULES = {
    "algorithm": "algorithms",
    "ask": "core.request",
    "assembly": "experiment.assembly",
    "batch": "core.batch",
    "check": "experiment.check",
    "cli.progress": "report.progress",
    "checkpoint": "experiment.checkpoint",
    "errors": "core.errors",
    "events": "experiment.events",
    "facility": "selection.submodular",
    "forms": "federation.reply_validation",
    "keys": "core.keys",
    "ledger": "privacy.ledger",
    "losses": "training.losses",
    "messages": "core.messages",
    "metrics": "evaluation.metrics",
    "network": "federation.network",
    "node": "privacy.gate",
    "optim": "training.optimisers",
    "outcome": "experiment.run_result",
    "overrides": "experiment.overrides",
    "policy": "privacy.policy",
    "prototypes": "training.prototypes",
    "recipe": "experiment.recipe",
    "records": "experiment.records",
    "registry": "core.registry",
    "rehearsal": "experiment.dry_run",
    "replies": "federation.replies",
    "schema": "core.schema",
    "selection.power": "selection.power_of_choice",
    "settings": "experiment.settings",
    "signals": "core.signals",
    "silos": "algorithms.hfm",
    "tasks": "core.tasks",
    "tracking": "experiment.tracking",
    "tree": "core.tree",
    "view": "training",
    "wire": "federation.wire_format",
}
"""The present place of each earlier module; both without `polyfed.`."""

NAMES = {
    "algorithm": {"Algorithm": "algorithms.base.Algorithm", "Averaging": "algorithms.averaging.Averaging"},
    "ask": {"Ask": "core.request.Request"},
    "forms": {"Forms": "federation.reply_validation.ReplyValidator"},
    "node": {"Node": "privacy.gate.EgressGate", "Site": "federation.context.ClientContext"},
    "replies": {"Part": "federation.replies.ReplyStack"},
    "view": {
        "AloneView": "training.SingleClientData",
        "Fit": "training.TrainingResult",
        "StackedView": "training.StackedClientData",
        "View": "training.ClientData",
    },
}
"""By earlier module, its names that have another name now or are not in the module that replaced it."""


class MovedModules(MetaPathFinder):
    """Says where a module is now when a script imports it by an earlier name.

    Python asks finders in order, and this one is the last: it sees only modules that no other finder has found, so it
    cannot hide one that exists and adds nothing to the time of a successful import.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing, and explain why when the module has moved.

        Raises:
            ModuleNotFoundError: the module is in `MODULES`. The error has no `name`: with one, Python would replace
                its text when a script writes `from polyfed import algorithm`.
        """
        package, _, old = fullname.partition(".")
        if package == "polyfed" and old in MODULES:
            raise ModuleNotFoundError(advice(old))


_FINDER = MovedModules()


def install() -> None:
    """Let Python ask `MovedModules` last; a second call changes nothing."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def advice(old: str) -> str:
    """What to import in place of an earlier module.

    >>> advice("replies")
    'polyfed.replies is now polyfed.federation.replies (Part is now ReplyStack in polyfed.federation.replies)'
    """
    names = []
    for name, place in NAMES.get(old, {}).items():
        module, _, new = place.rpartition(".")
        names.append(f"{name} {'' if new == name else f'is now {new} '}in polyfed.{module}")
    return f"polyfed.{old} is now polyfed.{MODULES[old]}" + (f" ({', '.join(names)})" if names else "")
