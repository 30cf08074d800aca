"""The new names of modules that have moved since earlier versions.

A script that still imports an old name gets an error that gives the new name.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MODULES = {
    "algorithm": "algorithms",
    "algorithms.private": "algorithms.private_blocks",
    "algorithms.towers": "algorithms.second_model",
    "ask": "core.request",
    "assembly": "experiment.assembly",
    "batch": "core.batch",
    "check": "experiment.check",
    "checkpoint": "experiment.checkpoint",
    "cli.audit": "cli.audit_log",
    "cli.progress": "report.progress",
    "cli.starting": "cli.init",
    "core.parsing": "core.json_and_toml",
    "core.signals": "core.stop_signals",
    "data.assignment": "data.modality_assignment",
    "data.cells": "data.cell_values",
    "data.draft": "data.table_draft",
    "data.facts_of_rows": "data.row_facts",
    "data.grouping": "data.column_grouping",
    "deploy.admission": "deploy.enrolment",
    "deploy.installed_client": "deploy.device_process",
    "engines.arena": "engines.shared_memory",
    "engines.heap": "engines.allocator",
    "engines.metered": "engines.work_count",
    "engines.openmp": "core.openmp",
    "errors": "core.errors",
    "evaluation.metrics": "evaluation.client_statistics",
    "events": "experiment.events",
    "experiment.norms": "experiment.update_norms",
    "experiment.places": "experiment.line_numbers",
    "experiment.run_checkpoint": "experiment.run_state",
    "experiment.starter": "experiment.first_recipe",
    "experiment.study.machine": "experiment.machine",
    "facility": "selection.submodular",
    "forms": "federation.reply_validation",
    "keys": "core.keys",
    "ledger": "privacy.ledger",
    "losses": "training.losses",
    "messages": "core.messages",
    "metrics": "evaluation.client_statistics",
    "model.adopt": "model.layer_replacement",
    "model.binding": "model.parameter_slots",
    "model.making": "model.seeded_modules",
    "model.own": "model.user_classes",
    "model.plain": "model.plain_module",
    "model.whole": "model.whole_module",
    "network": "federation.network",
    "node": "privacy.gate",
    "objective.confusion": "objective.class_metrics",
    "optim": "training.optimisers",
    "outcome": "experiment.run_result",
    "overrides": "experiment.overrides",
    "policy": "privacy.policy",
    "privacy.audit": "privacy.audit_log",
    "privacy.audit_check": "privacy.audit_log_verification",
    "prototypes": "training.prototypes",
    "recipe": "experiment.recipe",
    "records": "experiment.records",
    "registry": "core.registry",
    "rehearsal": "experiment.dry_run",
    "replies": "federation.replies",
    "report.evidence": "report.paired_differences",
    "report.progressions": "report.score_against_cost",
    "report.senders": "report.bytes_by_client",
    "report.sheets": "report.comparison_tables",
    "schema": "core.schema",
    "selection.power": "selection.power_of_choice",
    "settings": "experiment.settings",
    "signals": "core.stop_signals",
    "silos": "algorithms.hfm",
    "tasks": "core.tasks",
    "tracking": "experiment.tracking",
    "training.kept": "training.kept_training",
    "tree": "core.tree",
    "view": "training",
    "wire": "federation.wire_format",
}
"""A map from each earlier module to its new place. Both names lack the prefix `polyfed.`."""

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
"""For each earlier module, the names that have changed or have moved to a different module than the other names."""


class MovedModules(MetaPathFinder):
    """Explains where a module is now, if a script imports it by an earlier name.

    Python asks finders in order, and this finder is the last. It sees only modules that no other finder has found. It
    therefore cannot hide an existing module, and adds no time to a successful import.
    """

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Return None: Python then reports a missing module. For a moved module, raise an error with the new place.

        Raises:
            ModuleNotFoundError: `MODULES` lists the module as moved. The error's attribute `name` is not set. With a
                `name`, Python would ignore this error in a statement such as `from polyfed import algorithm`. It would
                raise an `ImportError` that does not give the new place.
        """
        package, _, old = fullname.partition(".")
        if package == "polyfed" and old in MODULES:
            raise ModuleNotFoundError(advice(old))


_FINDER = MovedModules()


def install() -> None:
    """Register `MovedModules` as Python's last finder. A second call changes nothing."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def advice(old: str) -> str:
    """Return a text that gives the new name of a module that has moved.

    >>> advice("replies")
    'polyfed.replies is now polyfed.federation.replies (Part is now ReplyStack in polyfed.federation.replies)'
    """
    names = []
    for name, place in NAMES.get(old, {}).items():
        module, _, new = place.rpartition(".")
        names.append(f"{name} {'' if new == name else f'is now {new} '}in polyfed.{module}")
    return f"polyfed.{old} is now polyfed.{MODULES[old]}" + (f" ({', '.join(names)})" if names else "")
