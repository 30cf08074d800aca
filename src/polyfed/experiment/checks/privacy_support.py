"""Determines which algorithms can honour [privacy] and [secure_aggregation], and why a recipe cannot.

The server checks a recipe before a run. A device that demands protection checks it again.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence

import torch

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError
from polyfed.core.masked import sum_only
from polyfed.core.messages import DESTINATIONS, KINDS
from polyfed.core.request import Task
from polyfed.core.tasks import parts, tasks_of, types_of
from polyfed.core.tree import SHARED, Tree
from polyfed.data import Population
from polyfed.federation.client_registry import ClientRegistry
from polyfed.model import Model
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.policy import Policy
from polyfed.selection import Selector

ANY = "any"
"""The name of an example modality, which is needed because there is no data that names modalities."""


def methods_that_honour(unit: str) -> str:
    """List the algorithms that support [privacy] with this unit, `client` or `example`.

    Algorithms that need other options than their defaults come last. So do algorithms that also send kinds of data that
    [privacy] does not protect.
    """
    able = {name: _wanted(cls, unit) for name, cls in sorted(ALGORITHMS.items()) if cls.honours(unit)}
    result = [name for name, wanted in able.items() if not wanted]
    result += [f"{name} with {' and '.join(wanted)}" for name, wanted in able.items() if wanted]
    return ", ".join(result)


def _wanted(cls: type[Algorithm], unit: str) -> list[str]:
    """List what a recipe must set so that an algorithm supports a unit of [privacy].

    The list names options of the algorithm, with their values. If the algorithm sends kinds of data that [privacy] does
    not protect, the list also names the option `unprotected`, with these kinds as its value.
    """
    method = cls(**cls.private_options)
    result = [f'{option} = "{value}"' for option, value in cls.private_options.items()]
    if kinds := unprotected(method, unit):
        result.append(f"unprotected = {_listed(kinds)}")
    return result


def unprotected(method: Algorithm, unit: str) -> tuple[str, ...]:
    """Return the kinds of data that the algorithm sends and that [privacy] does not protect, in the order of `KINDS`.

    Args:
        method: the algorithm with its options.
        unit: the unit of [privacy], which the algorithm supports.
    """
    covered = {*method.honours(unit), *withheld_of(method)}
    kinds = {types_of(task)[1].kinds[field] for name, task, field in sent(method) if f"{name}.{field}" not in covered}
    return tuple(kind for kind in KINDS if kind in kinds)


def withheld_of(method: Algorithm, accepted: Collection[str] = ()) -> tuple[str, ...]:
    """Return the fields of replies that clients fill with zeros under [privacy], as names `task.field`.

    The clients send these fields if the recipe accepts unprotected statistics. They also send them if the selector
    reads the replies, because the selector may need them.

    Args:
        method: the method with its options.
        accepted: the option `unprotected` of [privacy].
    """
    selector = getattr(method, "selector", None)
    reads = isinstance(selector, Selector) and type(selector).learn is not Selector.learn
    return () if reads or "statistic" in accepted else tuple(method.spare)


def sent(method: Algorithm, *, tested: bool = False) -> Iterator[tuple[str, Task, str]]:
    """Yield (name of the task, the task, name of the field) for every field that a reply can hold under some policy."""
    for name, task in tasks_of(method).items():
        if method.will_ask(name, tested=tested):
            for field in types_of(task)[1].kinds:
                if can_send(method, name, field):
                    yield name, task, field


def can_send(method: Algorithm, task: str, field: str) -> bool:
    """Return whether a field can hold any data of a modality or of the shared block, under any policy."""
    rules = {(ANY, destination): frozenset(KINDS) for destination in DESTINATIONS}
    cases = itertools.product((ANY, SHARED), (Policy(), Policy(rules)))
    return any(method.will_send(task, field, block, policy) for block, policy in cases)


def privacy_in_words(cls: type[Algorithm], unit: str) -> str:
    """Describe whether an algorithm supports a unit of [privacy], and with which options, or why it does not."""
    if not cls.honours(unit):
        return f"no: {cls.dishonour(unit)}"
    method, wanted = cls(), []
    if unit == "client" and isinstance(method, Averaging) and method.aggregation != "uniform":
        wanted.append('[algorithm] aggregation = "uniform"')
    wanted += _wanted(cls, unit)
    return f"yes, with {' and '.join(wanted)}" if wanted else "yes"


def secure_in_words(cls: type[Algorithm]) -> str:
    """Describe whether an algorithm, with its default options, can use [secure_aggregation], and if not, why."""
    method = cls()
    if method.single_replies:
        return f"no: {method.single_replies}"
    single = read_singly(method, tested=False)
    return f"no: the server reads {single[1]} of every single client" if single else "yes"


def read_singly(method: Algorithm, *, tested: bool) -> tuple[str, str] | None:
    """Return a task and a field of its reply that the server reads separately for each client, or None.

    Args:
        method: the algorithm with its options.
        tested: whether some clients have their own test rows.
    """
    secure = method.secure_aggregation
    own = tuple(prefix for prefix, part in parts(method) if secure is not None and part is secure)
    for name, task in tasks_of(method).items():
        if (own and name.startswith(own)) or not method.will_ask(name, tested=tested):
            continue
        reply = types_of(task)[1]
        if reply.masks is None and not sum_only(reply):
            field = next(field for field, said in reply.declared.items() if not said.sum_only)
            return name, f"{reply.__name__}.{field}"
    return None


def _listed(kinds: tuple[str, ...]) -> str:
    return "[" + ", ".join(f'"{kind}"' for kind in kinds) + "]"


def refuse(spec: Privacy, reasons: Sequence[str]) -> None:
    """Raise a `RecipeError` that lists why the section cannot be honoured, unless there are no reasons."""
    if reasons:
        raise RecipeError(f'[privacy] unit = "{spec.unit}" cannot be honoured: ' + "; ".join(reasons), ("privacy",))


def faults_of_model(model: Model, initial: Tree) -> Iterator[str]:
    """Yield a fault if the model has entries that are not trained parameters, because clients would send these too."""
    if buffers := [name for name in initial if name not in model.trainable(initial)]:
        yield (
            f"the model has buffers that follow the rows of a batch, such as {buffers[0]} (BatchNorm). Use layers "
            "without them, such as GroupNorm or LayerNorm"
        )


def share_rows(clients: ClientRegistry, population: Population, *, deployed: bool) -> bool:
    """Return whether several clients hold the same rows.

    In a deployment, the server does not know the rows. It assumes that the clients share rows if they are in silos.
    """
    if deployed:
        return clients.silo is not None
    rows = population.train.rows
    return len(rows) > 0 and int(torch.bincount(rows).max()) > 1


def faults_of_rows(model: Model, *, shared: bool) -> Iterator[str]:
    """Yield the reasons why [privacy] cannot protect single rows.

    Training could use a row more often than the calculation of epsilon assumes, or the gradients of single rows might
    not exist.

    Args:
        shared: whether several clients hold the same rows.
    """
    if shared:
        yield "several clients hold the same rows, as in silos, and epsilon counts the uses of a row by one client"
    if model.recomputes:
        yield "gradient checkpointing computes layers again, which the gradients of single rows do not allow"
