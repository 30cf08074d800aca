"""Admission: decide which clients take part in a deployment, and check the facts that they report in their enrolments.

The server cannot see the clients' data, so it cannot verify an enrolment. The number of classes comes from the recipe,
the server's own rows or more than half of the clients. The shape of a modality comes from the recipe, the server's own
rows or more than half of the clients that have the modality. If only one client has the modality, this client alone
determines the shape; `claimed_shapes.py` bounds what the shape can make the server build. The server limits each
client's number of rows to a multiple of the median. The server leaves out a client whose shapes or classes contradict
the others, and reports the reason. The run continues with the other clients.
"""

import statistics
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from polyfed.core.errors import BadReply, DataError, EgressError, RecipeError, TooFewReplies
from polyfed.data import Column, Columns, Population, Shards, stacked
from polyfed.data.column_fitting import Features, Statistics, Told, agreed, encoded, fits, is_fitted, told_shape
from polyfed.data.column_rules import MOST_WORDS, ColumnRule, rules_of, shape_of
from polyfed.data.columns import LEFT_OUT, TEST, TRAIN, VALIDATION
from polyfed.data.sources.own.npz import Npz
from polyfed.data.sources.own.table_files import Table
from polyfed.deploy.device.data import refuse_own_numbers
from polyfed.deploy.server.claimed_shapes import flaws_of
from polyfed.deploy.server.membership import expected, expected_edges
from polyfed.engines.protocol import ENROLLED, REFUSED, Enrolment, SiloEnrolment, digest_of_names, one_line
from polyfed.experiment.recipes.defaults import scaled
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.experiment.running.events import Emitter
from polyfed.federation.wire.wire_format import Packet

FEW_CLIENTS, SPREAD = 1000, 10
"""A client number must be below the larger of `FEW_CLIENTS` and `SPREAD` times the number of expected clients. The
reason is memory: the server's tables have a row for every number, and some algorithms need one for every pair."""

Shapes = Mapping[str, tuple[int, ...]]


def enrolled(recipe: Recipe, transport: Any, emit: Emitter, left_out: dict[int, str] | None = None) -> Population:
    """Wait for the clients of a deployment and decide which of them take part.

    Args:
        recipe: its [engine] section sets the number of clients, the waiting time, and fixed shapes and classes.
        transport: asks the nodes to enrol.
        emit: called with the name and the fields of each event.
        left_out: a dict to which `enrolled` adds an entry for each client that must not take part. The key is the
            client's number, and the value is the reason.

    Returns:
        The server's knowledge about the clients.

    Raises:
        TooFewReplies: fewer than `min_nodes` or fewer than `min_replies` clients take part.
        EgressError: the policy of a client refused to enrol, and the recipe's `on_refusal` is "stop".
    """
    if recipe.deployment.relay == "edge":
        return _enrolled_by_edges(recipe, transport, emit)
    spec, wanted, out = recipe.deployment, expected(recipe), {} if left_out is None else left_out
    least, stop = max(spec.min_nodes or wanted, recipe.engine.min_replies, 1), spec.on_refusal == "stop"
    answers: list[Packet] = transport.enrol(wanted, spec.enrol_seconds, _Waiting(wanted, least, emit, stop))
    known: list[Enrolment] = []
    absent: list[str] = []
    for answer in answers:
        try:
            known.append(enrolment_in(answer))
        except (BadReply, EgressError) as error:
            absent.append(str(error))
    admission = Admission.of(recipe, known, wanted, emit)
    out |= admission.left_out
    absent += [f"client {client}: {why}" for client, why in sorted(admission.left_out.items())]
    count, why = len(admission.clients), f"Not enrolled: {'; '.join(absent)}" if absent else "No other node answered"
    if count < least:
        raise TooFewReplies(
            f"{count} of {wanted} clients enrolled ([deployment] nodes, enrol_seconds = {spec.enrol_seconds:g}). "
            f"{why}. To start without some of them, set [deployment] min_nodes"
        )
    if count < wanted or absent:
        emit("note", text=f"WARNING: starting with {count} of {wanted} clients. {why}")
    for device in transport.not_taken():
        emit("note", text=f"WARNING: device {device} is online and not taken; num = {wanted}")
    for client in admission.left_out:
        transport.node_of.pop(client, None)
    return admission.population(emit)


def _enrolled_by_edges(recipe: Recipe, transport: Any, emit: Emitter) -> Population:
    """Wait for the edges of all silos, which tell what their devices have told them; see `enrolled`.

    Raises:
        DataError: a device does not fit the others, or two edges name one device. Its silo cannot do without it.
    """
    spec, wanted = recipe.deployment, expected_edges(recipe)
    waiting = _Waiting(wanted, wanted, emit, spec.on_refusal == "stop")
    known: list[Enrolment] = []
    absent: list[str] = []
    edges = 0
    for answer in transport.enrol(wanted, spec.enrol_seconds, waiting):
        try:
            refuse_unenrolled(answer)
            known += SiloEnrolment.read(answer.header).devices
            edges += 1
        except (BadReply, EgressError) as error:
            absent.append(str(error))
    if edges < wanted:
        why = f"Not enrolled: {'; '.join(absent)}" if absent else "No other edge answered"
        seconds = f"[deployment] enrol_seconds = {spec.enrol_seconds:g}"
        raise TooFewReplies(f"the edges of {edges} of {wanted} silos enrolled ({seconds}). {why}")
    if twice := [client for client, count in Counter(told.client for told in known).items() if count > 1]:
        raise DataError(f"two edges have a device with the number {twice[0]}. Number the devices of all silos from 0")
    admission = Admission.of(recipe, known, expected(recipe), emit)
    if admission.left_out:
        listed = "; ".join(f"client {client}: {why}" for client, why in sorted(admission.left_out.items()))
        raise DataError(f"devices of silos do not fit the federation. {listed}")
    return admission.population(emit)


class _Waiting:
    """Decides whether to wait longer, and emits the number of enrolled clients.

    It emits the number when it changes, and otherwise every `EVERY` seconds.
    """

    EVERY = 30.0

    def __init__(self, wanted: int, least: int, emit: Emitter, stop_on_refusal: bool) -> None:
        self.wanted, self.least, self.emit, self.stop_on_refusal = wanted, least, emit, stop_on_refusal
        self.said: int | None = None
        self.moment = 0.0

    def __call__(self, answers: Sequence[Packet]) -> bool:
        """Return True if all expected clients have enrolled or refused, and enough of them have enrolled.

        Raises:
            EgressError: a client refused, and `on_refusal` is "stop".
        """
        refused = [answer for answer in answers if answer.header.get("verdict") == REFUSED]
        if self.stop_on_refusal and refused:
            raise EgressError(one_line(refused[0].header.get("reason")))
        count = sum(answer.header.get("verdict") == ENROLLED for answer in answers)
        now = time.monotonic()
        complete: bool = count >= self.least and count + len(refused) >= self.wanted
        if count != self.said or now - self.moment >= self.EVERY:
            self.said, self.moment = count, now
            self.emit("enrolling", enrolled=count, wanted=self.wanted)
            word = "" if complete else "waiting: "
            self.emit("note", text=f"{word}{count} of {self.wanted} enrolled")
        return complete


def enrolment_in(answer: Packet) -> Enrolment:
    """Read the enrolment in an answer.

    Raises:
        EgressError: the client's policy refused to enrol.
        BadReply: the client's policy did not refuse, but the answer is not a valid enrolment.
    """
    refuse_unenrolled(answer)
    return Enrolment.read(answer.header)


def refuse_unenrolled(answer: Packet) -> None:
    """Raise an error if an answer is no enrolment; see `enrolment_in`."""
    if answer.header.get("verdict") == REFUSED:
        raise EgressError(one_line(answer.header.get("reason")))
    if answer.header.get("verdict") != ENROLLED:
        raise BadReply(one_line(answer.header.get("reason")))


@dataclass(frozen=True)
class Admission:
    """The clients that take part in the run, the shapes of their samples, and the number of classes.

    Attributes:
        clients: the enrolments of the clients that take part.
        left_out: the other clients, each with the reason.
        shapes: shape of a sample by modality.
        num_classes: number of classes.
        columns: the server's own rows, or None.
        recipe: the recipe.
        standardise: the modalities that every device standardises with the statistics of its own rows.
        features: the columns of each modality with rules in [data.columns], with the words and means of all clients.
        order: the modalities in the federation's order, if it is known.
    """

    clients: list[Enrolment]
    left_out: dict[int, str]
    shapes: Shapes
    num_classes: int
    columns: Columns | None
    recipe: Recipe
    standardise: tuple[str, ...] = ()
    features: Mapping[str, Features] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, known: Sequence[Enrolment], wanted: int, emit: Emitter) -> "Admission":
        """Decide which clients take part, according to the rules at the top of this module."""
        out: dict[int, str] = {}
        own = _own_rows(recipe, emit)
        highest = max(FEW_CLIENTS, SPREAD * wanted) - 1
        for told in known:
            strange = [name for name in told.modalities if name not in recipe.model.modalities]
            if strange:
                out[told.client] = f"[model.encoders] has no modality {strange[0]!r:.80}"
            elif told.client > highest:
                out[told.client] = f"its number is above {highest}; number {wanted} clients from 0"
        shapes = _agreed_shapes(recipe, own, _left(known, out), out)
        num_classes = _agreed_classes(recipe, own, _left(known, out), out)
        _refuse_other_names(own, _left(known, out), out)
        _refuse_many_words(_left(known, out), out)
        clients = sorted(_left(known, out), key=lambda told: told.client)
        features = _agreed_columns(recipe, shapes, clients)
        shapes = {**shapes, **{name: shape_of(own) for name, own in features.items()}}
        _refuse_other_shapes(recipe, shapes, features)
        return cls(clients, out, shapes, num_classes, own, recipe, _agreed_scaling(recipe, clients), features)

    def population(self, emit: Emitter) -> Population:
        """Return the server's knowledge about the clients. An unused client number becomes a client without rows."""
        columns = self._table()
        for name in self.recipe.model.encoders.keys() - columns.modalities.keys():
            emit("note", text=f"WARNING: no client that takes part has '{name}', so the model has no encoder for it")
        size = max(told.client for told in self.clients) + 1
        rows, tested, validated = (torch.zeros(size, dtype=torch.int64) for _ in range(3))
        holds = torch.zeros(size, len(columns.modalities), dtype=torch.bool)
        silo = torch.full((size,), -1)
        counted = capped_rows(self.clients, self.recipe.deployment.rows_cap, emit)
        for result in self.clients:
            rows[result.client], tested[result.client] = counted[result.client], int(result.tested)
            validated[result.client] = int(result.validated)
            holds[result.client] = torch.tensor([name in result.modalities for name in columns.modalities])
            silo[result.client] = -1 if result.silo is None else result.silo
        return Population(
            columns=columns,
            train=_elsewhere(rows),
            test=_elsewhere(tested) if bool(tested.any()) else None,
            holds=holds,
            silo=silo if bool((silo >= 0).any()) else None,
            test_rows=columns.rows(TEST),
            validation_rows=columns.rows(VALIDATION),
            limited=frozenset(told.client for told in self.clients if told.rows > counted[told.client]),
            own_validation=_elsewhere(validated) if bool(validated.any()) else None,
            told=_told_by(self.clients, size),
        )

    def _table(self) -> Columns:
        """Return the server's rows, or a single unused row if the server has no rows."""
        if self.columns is not None:
            agreed = tuple(name for name in self.standardise if name in self.columns.modalities)
            known = {name: self.features[name] for name in fits(self.columns)}
            own = replace(encoded(self.columns, known), num_classes=self.num_classes, standardise=agreed)
            rows = own.rows(TRAIN)
            return scaled(self.recipe, own, rows if len(rows) else torch.arange(len(own)))
        order = self.order or [n for n in getattr(self.recipe.data, "modalities", ()) if n in self.shapes]
        zero, split = torch.zeros(1, dtype=torch.int64), torch.full((1,), LEFT_OUT, dtype=torch.int8)
        shape = task_of(self.recipe).label_shape(self.num_classes)
        label = torch.zeros(1, *shape) if shape else zero
        columns = {
            name: Column(torch.zeros(1, *self.shapes[name]), features=self.features.get(name))
            for name in order or sorted(self.shapes)
        }
        agreed = tuple(name for name in self.standardise if name in columns)
        return Columns("deployed", columns, label, self.num_classes, split, zero, standardise=agreed)


def capped_rows(clients: Sequence[Enrolment], cap: float, emit: Emitter) -> dict[int, int]:
    """Return each client's number of rows, limited to `cap` times the median over the clients with rows.

    This function emits a note for each client above the limit. If `cap` is 0, there is no limit.
    """
    reported = [told.rows for told in clients if told.rows]
    most = int(cap * statistics.median_low(reported)) if cap and reported else max(reported, default=0)
    for result in clients:
        if result.rows > most:
            counted = f"{most} count ([deployment] rows_cap = {cap:g})"
            emit("note", text=f"WARNING: client {result.client} reports {result.rows} rows; {counted}")
    return {told.client: min(told.rows, most) for told in clients}


def _own_rows(recipe: Recipe, emit: Emitter) -> Columns | None:
    try:
        own: Columns = stacked(recipe.data.load(), recipe.stack)
    except DataError as error:
        emit("note", text=f"the server has no data, so there is no global evaluation ({error})")
        return None
    own = task_of(recipe).prepared(refuse_own_numbers(own, f"the server's [data] '{own.name}'"))
    emit("note", text=f"the global test set: {len(own.rows(TEST))} of the {len(own)} rows of [data]")
    return own


def _agreed_shapes(recipe: Recipe, own: Columns | None, known: list[Enrolment], out: dict[int, str]) -> Shapes:
    """Return the shape of a sample of every modality, and add clients with another shape to `out`."""
    fitted = _fitted_modalities(recipe)
    pinned = {name: tuple(shape) for name, shape in recipe.deployment.shapes.items() if name not in fitted}
    source = dict.fromkeys(pinned, "[deployment] shapes")
    for name, column in {} if own is None else own.modalities.items():
        if pinned.setdefault(name, told_shape(column)) != told_shape(column):
            raise DataError(
                f"[deployment] shapes: samples of '{name}' have shape {pinned[name]}, those of the server's own rows "
                f"{told_shape(column)}. Correct one of them",
                ("deployment", "shapes"),
            )
        source.setdefault(name, "the server's own rows")
    agreed: dict[str, tuple[int, ...]] = {}
    names = sorted({name for told in known for name in told.modalities} | {*pinned})
    holding = {name: [told for told in known if name in told.shapes] for name in names}
    found = {name: majority(told.shapes[name] for told in holders) for name, holders in holding.items()}
    claimed = [(m, shape) for m, shape in found.items() if own is None and m not in pinned and shape is not None]
    flaws = flaws_of(recipe, sorted(claimed, key=lambda claim: -len(holding[claim[0]])))
    for name, holders in holding.items():
        if name in flaws:
            out.update({told.client: flaws[name] for told in holders if told.client not in out})
            continue
        shape = pinned.get(name) or (None if own is not None else found[name])
        if shape is not None:
            agreed[name] = shape
        by = source.get(name, "most clients that have it")
        for told in holders:
            if shape is None and own is not None:
                out.setdefault(told.client, f"the server's own rows have no modality '{name}'")
            elif shape is None:
                fix = f"no shape of '{name}' has a majority; set [deployment] shapes = {{ {name} = [...] }}"
                out.setdefault(told.client, fix)
            elif told.shapes[name] != shape:
                out.setdefault(
                    told.client, f"samples of '{name}' have shape {told.shapes[name]} there, {shape} by {by}"
                )
    return agreed


def _fitted_modalities(recipe: Recipe) -> set[str]:
    """Return the modalities whose width depends on the words that clients tell."""
    own = recipe.data.features if isinstance(recipe.data, Npz) else {}
    return {name for name, features in own.items() if is_fitted({name: features})}


def refuse_fitted_elsewhere(recipe: Recipe) -> None:
    """Refuse rules that devices fit together if [data] is a source that they do not read.

    Images and texts are fitted to nothing: a device holds them as arrays of pixels and ids, whatever the source.

    Raises:
        RecipeError: [data.columns] has such rules, and the source is not `npz`.
    """
    rules: dict[str, ColumnRule] = {}
    if isinstance(recipe.data, Table):
        rules = rules_of("[data.columns]", recipe.data.columns)
    if fitted := [column for column, rule in rules.items() if not rule.is_whole]:
        raise RecipeError(
            f"[data.columns] of a deployment needs [data] name = 'npz', because devices read arrays: "
            f"{', '.join(fitted[:5])}{', ...' if len(fitted) > 5 else ''}. Save each of these columns as an array of "
            "words or numbers",
            ("data", "columns"),
        )


def _agreed_columns(recipe: Recipe, shapes: Shapes, clients: Sequence[Enrolment]) -> dict[str, Features]:
    """Return the columns of each modality with rules, with the words and means of all clients.

    Raises:
        RecipeError: the rules are those of a source that devices do not read.
        DataError: nobody has a word or a number of a column.
    """
    if not isinstance(recipe.data, Npz):
        refuse_fitted_elsewhere(recipe)
        return {}
    before = {name: features for name, features in recipe.data.features.items() if name in shapes}
    return agreed(before, [told.columns for told in clients], "the devices")


def _refuse_other_shapes(recipe: Recipe, shapes: Shapes, features: Mapping[str, Features]) -> None:
    for name in features:
        if (fixed := recipe.deployment.shapes.get(name)) is not None and tuple(fixed) != tuple(shapes[name]):
            raise DataError(
                f"[deployment] shapes: samples of '{name}' have shape {tuple(fixed)}, and the columns of "
                f"[data.columns] give {tuple(shapes[name])}. Leave the entry out, or name the words of the columns",
                ("deployment", "shapes"),
            )


def _refuse_many_words(known: Sequence[Enrolment], out: dict[int, str]) -> None:
    """Add to `out` the clients that name most words of a column, until all together name at most `MOST_WORDS`."""
    left = list(known)
    for modality, column in {(m, c) for told in known for m, own in told.columns.items() for c in own}:
        words = {told.client: {*told.columns.get(modality, {}).get(column, Told()).words} for told in left}
        while len(set().union(*words.values())) > MOST_WORDS:
            most = max(words, key=lambda client: len(words[client]))
            out[most] = f"with its words, column '{column}' would have more than {MOST_WORDS:,}"
            del words[most]
        left = [told for told in left if told.client in words]


def _told_by(clients: Sequence[Enrolment], size: int) -> tuple[Statistics, ...]:
    """Return what each client told about its columns, by client number."""
    by_number = {told.client: told.columns for told in clients}
    return tuple(by_number.get(number, {}) for number in range(size)) if any(by_number.values()) else ()


def _agreed_classes(recipe: Recipe, own: Columns | None, known: list[Enrolment], out: dict[int, str]) -> int:
    """Return the number of classes. In `out`, note each client that reports more classes, with the reason.

    A client with fewer classes stays, because it may lack rows of the last classes. If the objective has no classes,
    the result is the number of targets, which must be the same at every client.
    """
    of_classes = task_of(recipe).OF_CLASSES
    here = 0 if own is None else own.num_classes
    most = _classes_of_most([told.num_classes for told in known])
    agreed, by = max(here, most), "most clients" if most > here else "the server's own rows"
    if recipe.deployment.classes:
        agreed, by = recipe.deployment.classes, "[deployment] classes"
        if here > agreed:
            raise DataError(
                f"[deployment] classes = {agreed}, but the server's own rows have {here}. Raise it",
                ("deployment", "classes"),
            )
    for told in known:
        if not agreed:
            out[told.client] = "two clients report different numbers of classes; set [deployment] classes"
        elif told.num_classes > agreed or (told.num_classes != agreed and not of_classes):
            what = "classes" if of_classes else "targets a row"
            out[told.client] = (
                f"it has labels of {told.num_classes} {what}, there are {agreed} by {by}; [deployment] classes decides"
            )
    return agreed


def _refuse_other_names(own: Columns | None, known: Sequence[Enrolment], out: dict[int, str]) -> None:
    """Add to `out` each client whose list of class names differs from that of the server's rows, or of most clients.

    Under another list, one class number would mean another class. A client without a list has class numbers, which
    cannot be compared.
    """
    listed = [told for told in known if told.classes]
    here = "" if own is None else digest_of_names(own.class_names)
    agreed = here or majority(told.classes for told in listed)
    whose = "the server's own rows" if here else "most clients"
    for told in listed:
        if agreed is None:
            out[told.client] = "most clients do not agree on the class names ('label_name'). Save one list on all"
        elif told.classes != agreed:
            out[told.client] = f"its class names ('label_name') are not those of {whose}. Save one list on all"


def _agreed_scaling(recipe: Recipe, clients: Sequence[Enrolment]) -> tuple[str, ...]:
    """Return the modalities that all devices standardise.

    With [data] standardise = "uneven", these are the modalities that more than half of the devices that have them
    report as uneven.
    """
    held = Counter(name for told in clients for name in told.modalities)
    uneven = Counter(name for told in clients for name in told.uneven)
    return tuple(name for name in held if 2 * uneven[name] > held[name])


def _classes_of_most(reported: list[int]) -> int:
    """Return the smallest number of classes that is large enough for more than half of the clients, or 0.

    A single client that reports a wrong, large number cannot raise the result above the numbers of the others: with
    three or more clients, the result is at most the second largest number. The result is 0 if there are no clients, or
    if there are two clients with different numbers.
    """
    if not reported or (len(reported) == 2 and len({*reported}) == 2):
        return 0
    return statistics.median_high(reported)


def _left(known: Iterable[Enrolment], out: Mapping[int, str]) -> list[Enrolment]:
    return [told for told in known if told.client not in out]


_V = TypeVar("_V", bound=Hashable)


def majority(votes: Iterable[_V]) -> _V | None:
    """Return the value with more than half of the votes, or None."""
    counts = Counter(votes)
    result = counts.most_common(1)
    return result[0][0] if result and 2 * result[0][1] > counts.total() else None


def _elsewhere(sizes: torch.Tensor) -> Shards:
    """Return placeholders for rows on other machines. The server knows only their number for each client."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return Shards(offsets, torch.tensor([-1]).expand(int(offsets[-1])))
