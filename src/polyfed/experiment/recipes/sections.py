"""The registry of a recipe's sections, from which parsing, `Recipe.table`, overrides, options and docs follow."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from polyfed.algorithms import NAMED
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import RecipeError, did_you_mean
from polyfed.core.vocabulary import advice_for
from polyfed.data import SOURCES, ClientsSpec, Source
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.settings import CheckpointSpec, DeploymentSpec, EngineSpec, StopSpec
from polyfed.experiment.results.tracking import TRACKERS, Tracker
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.attack import Attack
from polyfed.federation.links.network import Network
from polyfed.federation.secure_aggregation.client import SecureAggregation
from polyfed.federation.wire.compression import Wire
from polyfed.model import ModelSpec
from polyfed.objective import OBJECTIVES, Objective
from polyfed.privacy.differential.section import Privacy
from polyfed.privacy.egress.limits import Limits
from polyfed.selection import SELECTORS, Selector
from polyfed.training.optimisers import Train


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a recipe.

    Attributes:
        cls: the dataclass whose fields are the section's keys or, if its key `name` chooses a class, the base class.
            None for a table without fixed keys.
        classes: name -> class that the key `name` can choose; empty if the section has one class.
        field: the field that holds the section: of the algorithm if `of_algorithm`, else of `Recipe`.
        of_algorithm: whether the section is a part of the algorithm.
        required: an example of the name, if every recipe must have the section.
        optional: whether the part is absent without the section. Otherwise the defaults of its class apply.
        hides_defaults: whether `Recipe.table` leaves the section out if all its values are defaults.
        title: what the classes are called, for the docs.
        result: whether the section can change the result of a run. Runs that differ in others have the same name.
        of_method: whether a method brings the section. In all others, methods that are compared must agree.
    """

    cls: type | None
    field: str
    classes: Mapping[str, type] | None = None
    of_algorithm: bool = False
    required: str = ""
    optional: bool = False
    hides_defaults: bool = False
    title: str = ""
    result: bool = True
    of_method: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """The keys that the section has, whatever class it names."""
        if self.classes is not None:
            return frozenset({"name"})
        return frozenset() if self.cls is None else frozenset(f.name for f in fields(self.cls))


SECTIONS: Mapping[str, Section] = {
    "data": Section(cls=Source, classes=SOURCES, field="data", required="cg-digits", title="Data sources"),
    "clients": Section(cls=ClientsSpec, field="clients"),
    "model": Section(cls=ModelSpec, field="model", of_method=True),
    "train": Section(cls=Train, field="train", of_algorithm=True),
    "algorithm": Section(
        cls=Algorithm, classes=NAMED, field="algorithm", required="fedavg", title="Algorithms", of_method=True
    ),
    "selection": Section(
        cls=Selector, classes=SELECTORS, field="selector", of_algorithm=True, title="Selectors", of_method=True
    ),
    "server": Section(cls=ServerOptimiser, field="server", of_algorithm=True, of_method=True),
    "evaluate": Section(cls=Evaluation, field="evaluation", of_algorithm=True),
    "network": Section(cls=Network, field="network", optional=True),
    "wire": Section(cls=Wire, field="wire", optional=True),
    "attack": Section(cls=Attack, field="attack", optional=True),
    "secure_aggregation": Section(
        cls=SecureAggregation, field="secure_aggregation", of_algorithm=True, optional=True, of_method=True
    ),
    "privacy": Section(cls=Privacy, field="privacy", optional=True),
    "egress": Section(cls=None, field="egress", of_method=True),
    "limits": Section(cls=Limits, field="limits", hides_defaults=True),
    "engine": Section(cls=EngineSpec, field="engine", of_method=True),
    "deployment": Section(cls=DeploymentSpec, field="deployment", hides_defaults=True),
    "checkpoint": Section(cls=CheckpointSpec, field="checkpoint", result=False),
    "stop": Section(cls=StopSpec, field="stop", hides_defaults=True),
    "tracking": Section(cls=Tracker, classes=TRACKERS, field="tracking", optional=True, title="Trackers", result=False),
    "task": Section(cls=Objective, classes=OBJECTIVES, field="task", optional=True, title="Tasks"),
}
"""Every section by name, in the order of a recipe file. `seed` and `rounds` come before the sections."""

PARTS: Mapping[str, str] = {section.field: name for name, section in SECTIONS.items() if section.of_algorithm}
"""The fields of an algorithm that are sections of their own, and the names of these sections."""


def homes(key: str) -> list[str]:
    """The sections that have an option of this name."""
    return [name for name, section in SECTIONS.items() if key in section.keys]


def misplaced(key: str, section: str = "") -> str | None:
    """Return a hint for an unknown key that has a place in another section, or in other words; None for no hint.

    Args:
        key: the unknown key.
        section: the section in which it stands.
    """
    if meant := advice_for(key, section):
        return meant
    others = [name for name in homes(key) if name != section] if key != "name" else []
    return f"did you mean {' or '.join(f'{name}.{key}' for name in others)}?" if others else None


def refuse_unknown(key: str) -> None:
    """Refuse a top-level key that is not a section.

    Raises:
        RecipeError: the key is not a section. The text lists the sections that have an option of this name, or else the
            nearest section.
    """
    if key in SECTIONS:
        return
    if sections := homes(key):
        places = " or ".join(f"{section}.{key}" for section in sections)
        raise RecipeError(f"'{key}' belongs in a section: write {places}", (key,))
    if meant := advice_for(key):
        raise RecipeError(f"no section or key '{key}'; {meant} Sections: {', '.join(SECTIONS)}", (key,))
    raise RecipeError(f"no section or key '{key}'; {did_you_mean(key, (*SECTIONS, 'seed', 'rounds'))}", (key,))
