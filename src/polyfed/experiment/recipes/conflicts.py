"""The table of conflicts: which options of a recipe cannot go together, whatever the data is.

A method declares the rows that are its own in `Algorithm.conflicts`. A recipe is compared with all rows when it is
made, and again when polyfed has guessed its task.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from polyfed.algorithms import ALGORITHMS, NAMED
from polyfed.algorithms.averaging import Averaging
from polyfed.algorithms.averaging.buffered import Buffered
from polyfed.algorithms.base import SCORING, Algorithm
from polyfed.algorithms.evaluate import Evaluate
from polyfed.core.messages import OF_THE_MODEL
from polyfed.core.problems import Conflict, Problems
from polyfed.core.registry import name_of
from polyfed.core.tasks import info_of, tasks_of, types_of
from polyfed.experiment.checks.privacy_support import methods_that_honour, sent, withheld_of
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.federation.aggregation import ServerOptimiser
from polyfed.federation.combined import combinable
from polyfed.federation.outliers import COMPARED
from polyfed.federation.wire.compression import compressible
from polyfed.objective import Classification, Regression
from polyfed.privacy.differential.section import Privacy
from polyfed.selection import Selector, Uniform

HONEST_ATTACKS = ("label-flip",)
"""Attacks that change a client's data, so that they also exist where the server sees no reply."""


def refuse_conflicts(recipe: Any, *, deployed: bool = False) -> None:
    """Refuse a recipe with options that cannot go together; one error lists all of them.

    Args:
        deployed: whether to check the rows for deployments, and no others.

    Raises:
        RecipeError: a row of the table applies.
    """
    problems, method = Problems(), name_of(recipe.algorithm, NAMED)
    for row in (*TABLE, *own_rows(type(recipe.algorithm))):
        if row.deployed == deployed and row.when(recipe):
            problems.add(row.fault(recipe, method, _value(recipe, row.key)))
    problems.raise_all()


def own_rows(method: type[Algorithm]) -> tuple[Conflict, ...]:
    """Return the rows that a method and its base classes declare."""
    return tuple(row for base in reversed(method.__mro__) for row in vars(base).get("conflicts", ()))


def every_row() -> Iterator[tuple[str, Conflict]]:
    """Yield each row of the table and of all methods once, with the name of a method that declares it, or ""."""
    yield from (("", row) for row in TABLE)
    seen: set[int] = set()
    for name, method in NAMED.items():
        for row in own_rows(method):
            if id(row) not in seen:
                seen.add(id(row))
                yield "" if row in vars(Averaging)["conflicts"] else name, row


def _value(recipe: Any, key: tuple[str, ...]) -> Any:
    section, *option = key
    part: Any = SECTIONS[section]
    if not option:
        return None
    default = getattr(getattr(recipe.algorithm if part.of_algorithm else recipe, part.field, None), option[0], None)
    return recipe.table().get(section, {}).get(option[0], default)  # the table leaves out sections of defaults


def _selector(recipe: Any) -> Selector | None:
    return getattr(recipe.algorithm, "selector", None)


def _drops(recipe: Any) -> bool:
    """Whether training leaves modalities out of rows."""
    given = recipe.algorithm.train.modality_dropout
    return any(given.values()) if isinstance(given, Mapping) else bool(given)


def _attack_is_idle(recipe: Any) -> bool:
    method = recipe.algorithm
    if recipe.attack is None or not recipe.attack.falsifies:
        return False
    training = {name: task for name, task in tasks_of(method).items() if name not in method.only_evaluates}
    asked = (types_of(task)[1] for name, task in training.items() if method.will_ask(name, tested=True))
    return not any(said.kind in COMPARED for reply in asked for said in reply.declared.values())


def _sends_within_silos(recipe: Any) -> bool:
    return any(info_of(task).scope == "silo" for task in tasks_of(recipe.algorithm).values())


def _compresses_nothing(recipe: Any) -> bool:
    """Whether no message of the method has anything that [wire] could compress."""
    method, wire = recipe.algorithm, recipe.wire
    if wire is None or method.uncompressed or method.secure_aggregation is not None:
        return False
    training = [name for name in tasks_of(method) if name not in SCORING and method.will_ask(name, tested=True)]
    asked = [types_of(tasks_of(method)[name]) for name in training]
    up = any(compressible(reply, field, got) for got, reply in asked for field in reply.declared)
    down = any(said.kind in OF_THE_MODEL for got, _ in asked for said in got.declared.values())
    return (bool(wire.forms) and not up) or (wire.down != "none" and not down)


def _privacy(recipe: Any, unit: str = "") -> Privacy | None:
    """Return the section [privacy] if the method can honour it: otherwise no other option would help."""
    spec = recipe.privacy
    wanted = spec is not None and unit in ("", spec.unit) and bool(recipe.algorithm.honours(spec.unit))
    return spec if wanted else None


def _of_mean(recipe: Any) -> Any:
    """Return the method if the server's mean must not reveal a client, otherwise None."""
    method = recipe.algorithm
    return method if _privacy(recipe, "client") is not None and isinstance(method, Averaging) else None


def _weighs_zero_rows(recipe: Any) -> bool:
    """Whether clients multiply protected numbers by numbers of rows that [privacy] replaces by zeros."""
    method, spec = recipe.algorithm, recipe.privacy
    if method.secure_aggregation is None or spec is None:
        return False
    withheld = withheld_of(method, spec.unprotected)
    for name, task, field in sent(method):
        kind = types_of(task)[1].masks
        by = None if kind is None else method.weight_of(field, kind)
        if by is not None and f"{name}.{by}" in withheld and f"{name}.{field}" not in withheld:
            return True
    return False


def _reads(recipe: Any) -> str:
    """Return how a selector reads protected fields in the replies of single clients; "" if it does not."""
    selector = _selector(recipe)
    if _of_mean(recipe) is None or selector is None:
        return ""
    kind = type(selector)
    learning = next(base for base in kind.__mro__ if "learn" in vars(base))
    if learning is Selector:
        return ""
    below = kind.__mro__[: kind.__mro__.index(learning) + 1]
    if not any("reads" in vars(base) for base in below):
        return (
            "it overrides learn, which gets the replies of single clients; if it reads no trained parameters, declare "
            "in `reads` the fields that it reads"
        )
    protected = {name.rpartition(".")[2] for name in recipe.algorithm.honours("client")}
    read = sorted({*selector.reads} & protected)
    return f"it reads {read[0]} of single clients" if read else ""


def _needs_a_secret(recipe: Any) -> Any:
    """Return the method if the cohort of a protected mean must be secret, otherwise None."""
    method = _of_mean(recipe)
    return method if method is not None and recipe.privacy is not None and recipe.privacy.amplification else None


def _needs_each_reply(
    when: Callable[[Any], Any], because: str, *, instead: str = "Remove combine", **more: Any
) -> Conflict:
    """Return the row of something that needs the reply of each client, and so cannot go with `combine`."""
    return Conflict(
        key=("engine", "combine"),
        when=lambda r: r.engine.combine == "nodes" and bool(when(r)),
        because=because,
        instead=instead,
        **more,
    )


def _measures(recipe: Any) -> bool:
    return recipe.network is not None and recipe.network.measured


def _deadline(recipe: Any) -> float | None:
    return None if recipe.network is None else recipe.network.deadline_s


def _uncombined(recipe: Any) -> str:
    """Return why no replies of the method can be summed where their clients ran, or ""."""
    method = recipe.algorithm
    if method.secure_aggregation is not None:  # another row refuses it
        return ""
    asked = {name: types_of(task)[1] for name, task in tasks_of(method).items() if method.will_ask(name, tested=True)}
    if method.single_replies or any(combinable(kind) for kind in asked.values()):
        return str(method.single_replies)
    return "its clients send no parameters or gradients of which the server reads only the sum"


def _why_not_honoured(recipe: Any) -> str:
    method, name = type(recipe.algorithm), name_of(recipe.algorithm, NAMED)
    assert recipe.privacy is not None
    unit = recipe.privacy.unit
    own = "" if name in ALGORITHMS else "; if your class keeps the rule of `protects`, declare `protects` in it"
    return f"{method.dishonour(unit)}{own}. Methods that can: {methods_that_honour(unit)}"


def _lacks_prototypes(recipe: Any) -> bool:
    """Whether the model has a place for prototypes and the method would leave them empty, or let them grow old."""
    filled = isinstance(recipe.algorithm, Evaluate) or getattr(recipe.algorithm, "variant", "") == "pmcmfl"
    return recipe.model.absent == "prototypes" and not filled


def _why_untrainable(recipe: Any) -> str:
    able = [name for name, cls in ALGORITHMS.items() if issubclass(type(recipe.task), cls.objectives)]
    return f"{recipe.algorithm.objectives_because}. Methods that can train it: {', '.join(able)}"


TABLE: tuple[Conflict, ...] = (
    Conflict(
        key=("task", "name"),
        when=lambda r: r.task is not None and not isinstance(r.task, r.algorithm.objectives),
        because="{detail}",
        detail=_why_untrainable,
        instead="Change one of the two",
    ),
    Conflict(
        key=("model", "absent"),
        when=_lacks_prototypes,
        because="only pmcmfl learns prototypes, and those of a warm start would grow old",
        instead="Remove absent",
    ),
    Conflict(
        key=("model", "absent"),
        when=lambda r: (
            r.model.absent == "input"
            and not isinstance(r.algorithm, Evaluate)
            and getattr(type(r.algorithm), "round", None) is not Averaging.round
        ),
        because="the server has to compute what each encoder makes of a sample of zeros after every mean of models",
        instead="Remove absent, or take an algorithm that averages in every round, such as fedavg",
    ),
    Conflict(
        key=("train", "modality_dropout"),
        when=lambda r: _drops(r) and not r.algorithm.handles_missing_rows,
        because="it takes every row of a client for complete, and would use embeddings of modalities that a row lost",
        instead="Remove modality_dropout",
    ),
    Conflict(
        key=("train", "modality_dropout"),
        when=lambda r: _drops(r) and r.task is not None and r.task.BY_MODALITY,
        beside="[task] name = 'retrieval'",
        because="the task learns from pairs of modalities, and a row with one modality is no pair",
        instead="Remove modality_dropout",
    ),
    Conflict(
        key=("selection", "name"),
        when=lambda r: not r.algorithm.trains_one_model and type(_selector(r)) not in (Uniform, type(None)),
        because="a selector compares clients by a global model, and none is trained by all clients here",
        instead="Remove [selection], so that clients are drawn uniformly",
    ),
    Conflict(
        key=("server",),
        when=lambda r: not r.algorithm.averages_models and r.algorithm.server != ServerOptimiser(),
        because="the server averages no models here, so [server] has no effect",
        instead="Remove [server]",
    ),
    Conflict(
        key=("clients", "overselect"),
        when=lambda r: (
            r.clients.overselect is not None
            and getattr(type(r.algorithm), "round", None) is not Averaging.round
            and not isinstance(r.algorithm, Buffered)
        ),
        because="it needs the replies of all clients that it asks, or asks them one after the other",
        instead="Remove overselect, or take an algorithm that averages, such as fedavg",
    ),
    Conflict(
        key=("clients", "overselect"),
        when=lambda r: r.clients.overselect is not None and r.network is None and not r.engine.apart,
        beside="a simulation without [network]",
        because="no client is slower than another where no time passes",
        instead="Add a section [network], take [engine] name = 'flower', or remove overselect",
    ),
    Conflict(
        key=("network",),
        when=lambda r: r.network is not None and not r.network.measured and r.engine.apart,
        beside="[engine] name = 'flower', or a deployment",
        because="[network] is simulated time, and both run in real time",
        instead="Remove [network]; a deployment of a method that schedules by rates takes channel = 'measured'",
    ),
    Conflict(
        key=("network", "channel"),
        when=lambda r: _measures(r) and r.engine.name != "devices",
        beside="a simulation",
        because="nothing travels over a link that could be measured: also Flower's messages stay on one machine",
        instead="Set [engine] name = 'devices' and deploy the recipe, or take channel = 'wireless' or 'fixed'",
    ),
    Conflict(
        key=("network", "channel"),
        when=lambda r: _measures(r) and not r.algorithm.reads_rates,
        because="nothing that it does depends on the rates of devices",
        instead="Remove [network], or take pfmml",
    ),
    Conflict(
        key=("network", "deadline_s"),
        when=lambda r: _measures(r) and r.network.deadline_s is not None,
        beside="[network] channel = 'measured'",
        because="the deadline is one of simulated time",
        instead="Remove deadline_s: [deployment] reply_seconds is the deadline of devices",
    ),
    Conflict(
        key=("wire", "compress"),
        when=lambda r: r.wire is not None and not r.wire.forms and r.wire.down == "none",
        beside="[wire] down = 'none'",
        because="the section then compresses nothing",
        instead="Set one of the two, or remove [wire]",
    ),
    Conflict(
        key=("wire",),
        when=lambda r: r.wire is not None and r.privacy is not None,
        beside="a section [privacy]",
        because="the noise is made for the norm to which clients clip what they send, and rounding changes this norm",
        instead="Remove [wire]",
    ),
    Conflict(
        key=("wire",),
        when=lambda r: r.wire is not None and r.algorithm.secure_aggregation is not None,
        beside="[secure_aggregation]",
        because="masked numbers look random, and do not compress. [secure_aggregation] bits sets their size",
        instead="Remove [wire]",
    ),
    Conflict(
        key=("wire",),
        when=lambda r: r.wire is not None and bool(r.algorithm.uncompressed),
        because="{detail}",
        detail=lambda r: r.algorithm.uncompressed,
        instead="Remove [wire]",
    ),
    Conflict(
        key=("wire",),
        when=_compresses_nothing,
        because="a message has no parameters that its receiver could compare with what it has, and no gradients",
        instead="Remove [wire], or its key compress",
    ),
    Conflict(
        key=("deployment", "relay"),
        when=lambda r: r.engine.apart and r.deployment.relay == "refused" and _sends_within_silos(r),
        because="its clients send messages within silos, which pass through the server in a deployment or on Flower",
        instead="Set relay = 'edge' if each silo has an edge, or 'server-sees' if the server may see them (each client "
        "must agree in its own configuration); otherwise use the sequential or vectorised engine",
    ),
    Conflict(
        key=("deployment", "relay"),
        when=lambda r: r.engine.apart and r.deployment.relay == "edge" and not r.algorithm.silo_parts,
        because="an edge runs what happens inside a silo, and this algorithm has nothing that an edge can run",
        instead="Take hfm, or remove relay",
    ),
    Conflict(
        key=("deployment", "relay"),
        when=lambda r: r.engine.name == "flower" and r.deployment.relay == "edge",
        beside="[engine] name = 'flower'",
        because="an edge is a process of a deployment",
        instead="Set relay = 'server-sees': in a simulation the server is the edge",
    ),
    Conflict(
        key=("stop", "max_epsilon"),
        when=lambda r: r.stop.max_epsilon is not None and r.privacy is None,
        beside="a recipe without [privacy]",
        because="that section counts the epsilon",
        instead="Add [privacy], or remove max_epsilon",
    ),
    Conflict(
        key=("stop", "patience"),
        when=lambda r: r.stop.patience is not None and r.algorithm.evaluation.every == 0,
        beside="[evaluate] every = 0",
        because="patience needs evaluations before the last round",
        instead="Set every = 1, or remove patience",
    ),
    Conflict(
        key=("evaluate", "unimodal"),
        when=lambda r: r.algorithm.evaluation.unimodal == "prototype" and not r.algorithm.sends_class_means,
        because="its clients send no class means of a global model's features; only those of methods that average "
        "parameters do",
        instead="Allowed here: 'auto', 'head', 'zero'",
    ),
    Conflict(
        key=("evaluate", "unimodal"),
        when=lambda r: (
            r.algorithm.evaluation.unimodal == "prototype"
            and r.task is not None
            and not isinstance(r.task, Classification)
        ),
        beside="a [task] other than classification",
        because="it compares features with the means of classes, which this task does not have",
        instead="Allowed here: 'auto', 'head', 'zero'",
    ),
    Conflict(
        key=("evaluate", "subsets"),
        when=lambda r: r.algorithm.evaluation.subsets != "none" and r.task is not None and r.task.WHOLE,
        beside="[task] name = 'retrieval'",
        because="the task compares the embeddings of two modalities, and predicts from no other subset",
        instead="Remove subsets",
    ),
    Conflict(
        key=("evaluate", "conformal"),
        when=lambda r: (
            r.algorithm.evaluation.conformal != "none"
            and r.task is not None
            and not isinstance(r.task, Classification | Regression)
        ),
        beside="a [task] other than classification and regression",
        because="sets are for classes, and intervals for numbers",
        instead="Remove conformal",
    ),
    Conflict(
        key=("evaluate", "conformal"),
        when=lambda r: r.algorithm.evaluation.conformal == "class" and isinstance(r.task, Regression),
        beside="[task] name = 'regression'",
        because="the task has no classes",
        instead="Set conformal = 'split'",
    ),
    Conflict(
        key=("evaluate", "conformal_groups"),
        when=lambda r: (
            r.algorithm.evaluation.conformal != "none"
            and r.algorithm.evaluation.conformal_groups != "all"
            and r.algorithm.secure_aggregation is not None
        ),
        beside="[secure_aggregation]",
        because="secure aggregation gives sums over all clients only",
        instead="Set conformal_groups = 'all'",
    ),
    Conflict(
        key=("evaluate", "shrinkage"),
        when=lambda r: (
            r.algorithm.evaluation.shrinkage
            and r.algorithm.evaluation.conformal != "none"
            and r.task is not None
            and not isinstance(r.task, Classification)
        ),
        beside="a [task] other than classification",
        because="the widths of intervals follow from the counts of `conformal`, so predict_set has it anyway",
        instead="Remove shrinkage",
    ),
    Conflict(
        key=("attack",),
        when=lambda r: r.attack is not None,
        beside="a deployment",
        because="it has clients lie, which only a simulation may",
        instead="Remove [attack]",
        deployed=True,
    ),
    Conflict(
        key=("attack", "name"),
        when=_attack_is_idle,
        because="the attack changes what clients send, and these send the server only statistics for training",
        instead="Choose 'label-flip', or 'backdoor' with scale = 1.0, which change what attackers train on, or remove "
        "[attack]",
    ),
    Conflict(
        key=("attack", "name"),
        when=lambda r: (
            r.algorithm.secure_aggregation is not None and r.attack is not None and r.attack.name not in HONEST_ATTACKS
        ),
        beside="[secure_aggregation]",
        because="the attack changes single replies on their way, and under [secure_aggregation] they are masked",
        instead=f"Allowed: {', '.join(HONEST_ATTACKS)}",
    ),
    Conflict(
        key=("secure_aggregation",),
        when=lambda r: r.algorithm.secure_aggregation is not None and bool(r.algorithm.single_replies),
        because="{detail}",
        detail=lambda r: r.algorithm.single_replies,
        instead="Remove one of the two",
    ),
    Conflict(
        key=("privacy", "amplification"),
        when=lambda r: r.algorithm.secure_aggregation is not None and r.privacy is not None and r.privacy.amplification,
        beside="[secure_aggregation]",
        because="amplification needs a secret cohort, and the clients of a cohort see one another's public keys",
        instead="Remove amplification",
    ),
    Conflict(
        key=("privacy", "clip"),
        when=lambda r: r.algorithm.secure_aggregation is not None and r.privacy is not None and r.privacy.adaptive,
        beside="[secure_aggregation]",
        because="adaptive clipping needs the norms of single updates, and the server reads only sums",
        instead='Set clip = "joint"',
    ),
    Conflict(
        key=("algorithm", "aggregation"),
        when=_weighs_zero_rows,
        beside="[secure_aggregation] and [privacy]",
        because="clients multiply what they send by their number of rows, and under [privacy] they send zeros for it",
        instead='Set aggregation = "uniform"',
    ),
    _needs_each_reply(
        lambda r: r.engine.apart,
        "each of them sends its own reply",
        beside="clients that run in processes of their own",
    ),
    _needs_each_reply(_uncombined, "{detail}", detail=_uncombined),
    _needs_each_reply(
        lambda r: r.algorithm.secure_aggregation is not None,
        "the server removes the masks of single replies",
        beside="[secure_aggregation]",
    ),
    _needs_each_reply(
        lambda r: r.attack is not None and r.attack.name not in HONEST_ATTACKS,
        "the attack changes single replies on their way",
        beside="[attack]",
    ),
    _needs_each_reply(
        lambda r: r.privacy is not None and r.privacy.unit == "client",
        "the server clips each update",
        beside='[privacy] unit = "client"',
    ),
    _needs_each_reply(
        lambda r: r.clients.overselect is not None or _deadline(r) is not None,
        "a reply that comes too late would be in a sum already",
        beside="[clients] overselect or [network] deadline_s",
    ),
    _needs_each_reply(
        lambda r: r.clients.ranks is not None, "adapters of different ranks cannot be added", beside="[clients] ranks"
    ),
    _needs_each_reply(
        lambda r: r.checkpoint.updates,
        "it keeps the update of each client",
        beside="[checkpoint] updates",
        instead="Remove one of the two",
    ),
    Conflict(
        key=("privacy", "unit"),
        when=lambda r: r.privacy is not None and not r.algorithm.honours(r.privacy.unit),
        because="{detail}",
        detail=_why_not_honoured,
        instead="Take one of them, or remove [privacy]",
    ),
    Conflict(
        key=("privacy", "amplification"),
        when=lambda r: (spec := _privacy(r, "client")) is not None and spec.amplification,
        beside="a deployment",
        because="it needs a secret cohort, and every request holds the seed of the run, from which each device could "
        "compute all cohorts",
        instead="Remove amplification",
        deployed=True,
    ),
    Conflict(
        key=("algorithm", "aggregation"),
        when=lambda r: (method := _of_mean(r)) is not None and method.aggregation != "uniform",
        beside='[privacy] unit = "client"',
        because="weights by rows give some clients more influence",
        instead='Set aggregation = "uniform"',
    ),
    Conflict(
        key=("server", "aggregate"),
        when=lambda r: (method := _of_mean(r)) is not None and method.server.aggregate != "mean",
        beside='[privacy] unit = "client"',
        because="the rule has no bounded sensitivity",
        instead='Set aggregate = "mean"',
    ),
    Conflict(
        key=("selection", "name"),
        when=lambda r: (method := _of_mean(r)) is not None and type(method.selector).weigh is not Selector.weigh,
        beside='[privacy] unit = "client"',
        because="the selector sets the weights of the mean",
        instead="Remove [selection]",
    ),
    Conflict(
        key=("selection", "name"),
        when=lambda r: bool(_reads(r)),
        beside='[privacy] unit = "client"',
        because="{detail}",
        detail=_reads,
        instead="Remove [selection]",
    ),
    Conflict(
        key=("privacy", "amplification"),
        when=lambda r: (
            (method := _needs_a_secret(r)) is not None
            and (type(method.selector) is not Uniform or method.selector.overselect is not None)
        ),
        beside="[selection] other than uniform, or [clients] overselect",
        because="such cohorts depend on the data",
        instead="Take the selector uniform without overselect, or remove amplification",
    ),
    Conflict(
        key=("privacy", "amplification"),
        when=lambda r: (
            (method := _needs_a_secret(r)) is not None
            and bool(method.private or method.fine_tune or type(method).local is not Algorithm.local)
        ),
        beside="clients with a state of their own",
        because="it would tell later who was in a cohort",
        instead="Remove private and fine_tune, take fedavg, or remove amplification",
    ),
    Conflict(
        key=("task", "name"),
        when=lambda r: _privacy(r, "example") is not None and r.task is not None and bool(r.task.mixes_rows),
        beside='[privacy] unit = "example"',
        because="{detail}",
        detail=lambda r: r.task.mixes_rows,
        instead="Change one of the two",
    ),
    Conflict(
        key=("train", "steps"),
        when=lambda r: _privacy(r, "example") is not None and r.algorithm.train.steps is not None,
        beside='[privacy] unit = "example"',
        because="clients would pass over their rows a different number of times",
        instead="Remove steps and set epochs",
    ),
    Conflict(
        key=("train", "accumulate"),
        when=lambda r: _privacy(r, "example") is not None and r.algorithm.train.accumulate > 1,
        beside='[privacy] unit = "example"',
        because="the gradient of a part of a batch is no gradient of single rows",
        instead="Set accumulate = 1",
    ),
)
"""The rows that belong to no single method."""
