"""The recipes whose messages are corrupted, by a hostile server or a hostile device: every method, and options."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from laws.rows import PROTOTYPES, ROWS
from laws.test_laws import world
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.laws.replies import everybody
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import DivFl, PowD, Selector
from world import AWKWARD


def under(selector: Selector) -> Recipe:
    """FedAvg, its cohort chosen by a selector that asks the clients itself."""
    made = world("fedavg")
    return replace(made, algorithm=replace(made.algorithm, selector=selector))  # type: ignore[call-arg]


def u_shaped() -> Recipe:
    """SplitFed whose clients keep labels and head."""
    made = world("splitfed", u_shaped=True)
    egress = {block: {"server": ["parameters", "embeddings", "statistic"]} for block in ("a", "b", "shared")}
    return replace(made, model=replace(made.model, head=(8,)), egress=egress)


def judged_by_prototypes(name: str) -> Recipe:
    """An evaluation for which the clients send class means."""
    made = world(name, evaluation=Evaluation(every=0, unimodal="prototype"))
    return replace(made, egress=PROTOTYPES | {"shared": {"server": ["parameters", "statistic"]}})


def noisy() -> Recipe:
    """FedAvg whose clients add the noise."""
    made = replace(everybody(world("fedavg")), rounds=2)
    made = replace(made, algorithm=replace(made.algorithm, aggregation="uniform"))  # type: ignore[call-arg]
    return replace(
        made,
        privacy=Privacy(
            unit="client",
            noise_at="client",
            noise_multiplier=4.0,
            delta=0.01,
            clip_norm=0.5,
            unprotected=("statistic",),
        ),
    )


def secured(name: str, **options: Any) -> Recipe:
    """A method whose replies are masked."""
    return everybody(world(name, secure_aggregation=SecureAggregation(min_clients=2), **options))


CASES: dict[str, Callable[[], Recipe]] = {
    **{name: lambda name=name: everybody(world(name)) for name in sorted(ROWS)},  # type: ignore[misc]
    "cmsfed, deltas": lambda: everybody(world("cmsfed", gradient_split="delta")),
    "splitfed, u-shaped": u_shaped,
    "hfm, head at the edge": lambda: world("hfm", head_update="server"),
    "fedavg under divfl": lambda: under(DivFl(participation=3)),
    "fedavg under pow-d": lambda: under(PowD(participation=3, d=6, allow_incongruent=True)),
}
"""Every method, and options under which a method sends other messages."""

FURTHER: dict[str, Callable[[], Recipe]] = {
    "fedavg, BatchNorm": lambda: everybody(world("fedavg", encoders=AWKWARD)),
    "fedavg, private head, fine-tuned": lambda: everybody(world("fedavg", private=("head",), fine_tune=1)),
    "fedavg, judged by prototypes": lambda: everybody(judged_by_prototypes("fedavg")),
    "fedavg, noise of the clients": noisy,
    "fedavg, secure aggregation": lambda: secured("fedavg"),
    "fedproto, original": lambda: everybody(world("fedproto", mode="original")),
}
