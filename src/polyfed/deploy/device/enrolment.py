"""What a device tells the server when it enrols, or why it refuses to enrol."""

import torch

from polyfed.core.batch import Batch
from polyfed.core.tree import SHARED
from polyfed.data import Population, Shards
from polyfed.data.column_fitting import told_shape
from polyfed.engines.protocol import REFUSED, Enrolment, digest_of_names, reason
from polyfed.experiment.running.column_statistics import refuse_forbidden
from polyfed.federation.client_registry import registry_of
from polyfed.federation.wire.wire_format import Packet
from polyfed.objective import CLASSES, Objective
from polyfed.privacy.egress.limits import NO_LIMITS, Limits
from polyfed.privacy.egress.policy import Policy


def enrolment(
    population: Population,
    policy: Policy,
    client: int,
    limits: Limits = NO_LIMITS,
    objective: Objective = CLASSES,
    *,
    evaluated: bool = True,
) -> Packet:
    """Return a client's enrolment with the facts that the server needs before its first request, or else a refusal.

    Args:
        population: the device's data, in which each client has the same number as in the federation.
        policy: the client's policy. It must allow statistics of the `shared` block to go to the server.
        client: the client's number in the federation.
        limits: the limits that the client's device sets.
        objective: what the model learns to predict.
        evaluated: whether the device lets the run read its own test and validation rows; else it tells of none.
    """
    columns, registry = population.columns, registry_of(population)
    known = registry[client]
    if why := enrolment_refusal(known.num_rows, policy, client, limits):
        return reason(REFUSED, None, why)
    statistics = population.told[client] if population.told else {}
    refuse_forbidden(statistics, policy, client)
    result = Enrolment(
        client=client,
        rows=known.num_rows,
        modalities=known.modalities,
        silo=known.silo,
        tested=evaluated
        and client in registry.tested
        and _enough(population, population.test, client, limits, objective),
        validated=evaluated
        and client in registry.validated
        and _enough(population, population.own_validation, client, limits, objective),
        shapes={name: told_shape(columns.modalities[name]) for name in known.modalities},
        num_classes=columns.num_classes,
        classes=digest_of_names(columns.class_names),
        uneven=columns.standardise if isinstance(columns.standardise, tuple) else (),
        columns={name: dict(own) for name, own in statistics.items()},
    )
    return Packet(result.header())


def _enough(population: Population, own: Shards | None, client: int, limits: Limits, objective: Objective) -> bool:
    """Return whether a score on these own rows of the client covers enough rows in each group; see `Limits`."""
    assert own is not None, "a client is scored on rows"
    y = population.columns.label[own[client]]
    sizes = objective.group_sizes(Batch({}, y, torch.arange(len(y)))).reshape(-1)
    return bool((sizes[sizes > 0] >= (limits.value("min_test_rows") or 0)).all())


def enrolment_refusal(rows: int, policy: Policy, client: int, limits: Limits) -> str:
    """Return why a client with this number of training rows refuses to take part in a run, or "" if it takes part.

    A device also calls this function for every task, because a server may send a task to a device that has never
    enrolled. The text does not contain the number of rows, because a client that takes no part does not reveal it.
    """
    if not policy.allows("statistic", SHARED, "server"):
        fix, why = policy.fix(("statistic",), SHARED, "server"), policy.inherited(("statistic",), SHARED, "server")
        what = f"client {client} refused to enrol, which tells the server how many rows it has (a statistic)"
        return f"{what}{why and f': {why}'}. It would enrol if the client's policy said: {fix}"
    if rows < limits.min_rows:
        whose = "recipe" if limits.is_of_the_recipe("min_rows") else "device"
        line = f"[limits] min_rows = {limits.min_rows} of the {whose}"
        return f"client {client} refused to enrol: it has fewer training rows than {line}"
    return ""
