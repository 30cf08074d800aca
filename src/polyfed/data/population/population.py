"""Splits a table over clients: the rows and modalities that each client holds, and the test and validation rows."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import DataError, PolyfedWarning, RecipeError, counted
from polyfed.core.problems import copied
from polyfed.data.column_fitting import Statistics, fitted_to
from polyfed.data.columns import GUARD, OWN_TEST, OWN_TRAIN, TEST, TRAIN, VALIDATION, Columns, check_finite
from polyfed.data.partitions.base import Partition, refuse_targets
from polyfed.data.partitions.by_client import ByClient, natural_clients
from polyfed.data.partitions.persons import Units, divided_persons, hold_out, told_of_persons
from polyfed.data.partitions.shards import Shards
from polyfed.data.population.clients import ClientsSpec
from polyfed.data.population.missing_rows import lost_rows
from polyfed.data.population.modality_assignment import assign, devices_per_silo
from polyfed.data.population.silo_devices import dealt_to_devices, of_clients
from polyfed.data.population.splits import held_out_blocks
from polyfed.data.population.unseen_clients import held_out


@dataclass(frozen=True)
class Population:
    """A data set split over K clients.

    Attributes:
        columns: The table.
        train: Training rows of each client.
        test: Own test rows of each client, which may be empty for some clients. None if no client has own test rows.
        holds: bool (K, M), which modalities each client holds, in the order of `columns.modalities`.
        silo: int64 (K,), silo of each client. None if there are no silos.
        test_rows: Global test set, int64, ascending. If the data has no global test set, it is the union of the
            clients' own test rows.
        validation_rows: Pooled validation set, int64, ascending.
        limited: In a deployment, the clients that reported more rows than the option `rows_cap` of the [engine]
            section allows. In averages, the weight of such a client is the allowed number of rows, not the reported
            number.
        own_validation: The validation rows of each client, which a device holds itself. None if no client has any. In a
            simulation, these are the rows of `personal_validation`, or of `validation`, which the server pools as well.
        told: What each client told about the columns of [data.columns], if anything was fitted to them.
    """

    columns: Columns
    train: Shards
    test: Shards | None
    holds: Tensor
    silo: Tensor | None
    test_rows: Tensor
    validation_rows: Tensor
    limited: frozenset[int] = frozenset()
    own_validation: Shards | None = None
    told: tuple[Statistics, ...] = ()

    @property
    def num_clients(self) -> int:
        """Number of clients K."""
        return len(self.train)

    def name_of(self, client: int) -> str | None:
        """Return the name of the natural client from which all rows of a client come, if there is one.

        Only a machine that has read the table knows names. No message has one, so a deployment has numbers.
        """
        if self.columns.client is None:
            return None
        shards = (self.train, self.test, self.own_validation)
        own = torch.cat([one[client] for one in shards if one is not None and client < len(one)])
        numbers = torch.unique(self.columns.client.cpu()[own])
        return self.columns.name_of_client(int(numbers[0])) if len(numbers) == 1 else None

    def modalities(self, client: int) -> tuple[str, ...]:
        """Names of the modalities that a client holds."""
        held = self.holds[client].tolist()
        return tuple(name for name, has in zip(self.columns.modalities, held, strict=True) if has)


def populate(columns: Columns, clients: ClientsSpec, key: int) -> Population:
    """Split a data set over clients.

    Args:
        columns: The table. This function checks its features for NaN and infinity.
        clients: The schema of `[clients]`.
        key: Key of the run. There is a separate random stream for each of five steps: the partition, the validation
            split, the choice of own test rows, the assignment of modalities and the rows that lose a modality.

    Raises:
        DataError: A feature is not finite, or a client has no row or no modality.
        RecipeError: The data lacks something that an option requires.
    """
    check_finite(columns)
    columns = held_out(columns, clients, key)
    roles = _roles(columns, clients)
    columns = _with_notes(columns, clients, roles)
    train, own_test, validation, by_owner = _split(columns, roles, clients, key)
    own_validation = validation if by_owner and len(validation.rows) else None
    every = torch.cat([columns.rows(VALIDATION), validation.rows]).sort().values
    pooled = columns.rows(VALIDATION) if clients.personal_validation else every
    if clients.measure_on == "validation" and clients.personal_validation:
        own_test = own_validation
    elif clients.measure_on == "validation":
        in_blocks = validation if clients.row_split == "blocks" else None
        train, own_test = _own_validation(columns, train, own_test, pooled, in_blocks, clients, key)
    silo = None
    if clients.partition == "silos":
        names = tuple(columns.modalities)
        silo = torch.arange(len(train)).repeat_interleave(devices_per_silo(clients, names))
        device_key = keys.key(key, "devices of silos")
        train = dealt_to_devices(train, clients, names, keys.key(device_key, 0), columns.person)
        own_test = _dealt(own_test, clients, names, keys.key(device_key, 1), columns.person)
        own_validation = _dealt(own_validation, clients, names, keys.key(device_key, 2), columns.person)
    test_rows = pooled if clients.measure_on == "validation" else columns.rows(TEST)
    if len(test_rows) == 0 and own_test is not None:
        test_rows = torch.from_numpy(np.unique(own_test.rows.numpy()))
    holds = _holds(columns, clients, train, keys.key(key, "modality assignment"))
    if clients.loses_rows:
        rows = torch.cat([test_rows, every])
        lost = lost_rows(columns, clients, holds, train, own_test, rows, keys.key(key, "missing rows"))
        columns = columns.without(lost)
        holds = _holds(columns, clients, train, keys.key(key, "modality assignment"))
    if silo is not None and not bool(holds.any(1).all()):  # a natural silo may lack a modality, and then its device
        # a silo without any modality stays, for the check below
        kept = (holds.any(1) | ~torch.isin(silo, silo[holds.any(1)])).nonzero()[:, 0].tolist()
        train = of_clients(train, kept)
        own_test, own_validation = (p if p is None else of_clients(p, kept) for p in (own_test, own_validation))
        silo, holds = silo[kept], holds[kept]
    population = Population(
        columns=replace(columns, person=None),
        train=train,
        test=own_test,
        holds=holds,
        silo=silo,
        test_rows=test_rows,
        validation_rows=pooled,
        own_validation=own_validation,
    )
    _check(population, clients)
    return population


def _dealt(
    own: Shards | None, clients: ClientsSpec, names: Sequence[str], key: int, person: Tensor | None
) -> Shards | None:
    """Return rows of silos by device; see `dealt_to_devices`."""
    return None if own is None else dealt_to_devices(own, clients, names, key, person)


def warn_of_divided(columns: Columns, roles: Tensor | None = None) -> None:
    """Warn if the data's own splits divide persons. polyfed divides none of its own accord.

    Args:
        roles: see `_roles`; None if own test rows do not count.
    """
    if columns.person is None:
        return
    side = torch.full((len(columns),), -1, dtype=torch.int64)
    for place, code in enumerate((TRAIN, VALIDATION, TEST)):
        side[columns.split.cpu() == code] = place
    if roles is not None:
        side[roles == OWN_TEST] = 2
        side[roles == GUARD] = -1
    persons, rows = divided_persons(columns.person, side)
    if persons:
        count = counted(persons, "person has", "persons have")
        warnings.warn(
            f"data '{columns.name}': the splits that the data brings divide persons: {count} rows on both sides of "
            f"training, validation and test, {counted(rows, 'row', 'rows')} of them held out, so the scores are also "
            "about people who were seen in training. Keep each person on one side, or let polyfed draw the split "
            "(remove it, [data] test_share)",
            PolyfedWarning,
            stacklevel=3,
        )


def with_fitted_columns(population: Population) -> Population:
    """Return the population with numbers in place of words, empty cells and dates, as [data.columns] says."""
    shares = ((population.train[k], population.modalities(k)) for k in range(population.num_clients))
    columns, result = fitted_to(population.columns, shares)
    return replace(population, columns=columns, told=tuple(result) if any(result) else ())


OWN_VALIDATION = 3
"""The role of a row that blocks hold out for validation, next to those of `Columns.split_personal`."""


def _split(
    columns: Columns, roles: Tensor, clients: ClientsSpec, key: int
) -> tuple[Shards, Shards | None, Shards, bool]:
    """Return training rows, own test rows and validation rows, and whether the latter are listed by client.

    If each natural client is cut into several clients, random validation rows are listed by natural client.
    """
    partition = clients.build_partition()
    rows = ((roles >= 0) & (roles != GUARD)).nonzero()[:, 0].numpy()
    val_key, part_key, own_key = (keys.key(key, part) for part in ("validation", "partition", "own test"))
    validation, natural = None, isinstance(partition, ByClient) and clients.row_split == "random"
    if natural:
        owners = Shards.of(natural_clients(columns, rows))
        validation = hold_out(owners.where(roles[owners.rows] == OWN_TRAIN), columns, clients.validation, val_key)[1]
        left = np.ones(len(columns), dtype=np.bool_)
        left[validation.rows.numpy()] = False
        rows = rows[left[rows]]
    shards = _divided(partition, columns, rows, part_key)
    of_rows = roles[shards.rows]
    train, marked = shards.where(of_rows == OWN_TRAIN), shards.where(of_rows == OWN_TEST)
    if clients.row_split == "blocks":
        validation = shards.where(of_rows == OWN_VALIDATION)
    elif validation is None or clients.personal_validation:
        train, validation = hold_out(train, columns, clients.personal_validation or clients.validation, val_key)
    by_owner = not natural or len(validation) == len(train)
    if clients.personal_test is None:
        return train, None, validation, by_owner
    if clients.personal_test == "matched":
        return train, matched(columns, train, own_key), validation, by_owner
    if clients.personal_test == "split_personal" or clients.row_split == "blocks":
        return train, marked, validation, by_owner
    if columns.split_personal is not None and bool((columns.split_personal == GUARD).any()):
        warnings.warn(
            f"clients.personal_test = {clients.personal_test:g} draws test rows at random, and data '{columns.name}' "
            "marks rows that overlap others as guard rows. personal_test = 'split_personal' takes the marked test rows "
            "and leaves the guard rows out",
            PolyfedWarning,
            stacklevel=2,
        )
    return *hold_out(train, columns, float(clients.personal_test), own_key), validation, by_owner


def _divided(partition: Partition, columns: Columns, rows: np.ndarray, key: int) -> Shards:
    """Split rows over clients. If the data names persons, each is in one client, except where the data says otherwise.

    Raises:
        RecipeError: the partition returns other rows than it was given, or cannot keep persons whole.
    """
    units = Units.of(columns, rows, partition)
    table, given = (columns, rows) if units is None else (units.columns, units.rows.copy())
    try:
        shards = Shards.of(partition.split(table, given, key))
    except (RecipeError, DataError) as error:
        raise error if units is None else copied(error, f"{error} (here, a row is a person: [data] person)") from None
    _check_partition(partition, shards, given, len(columns))
    return shards if units is None else units.expanded(shards)


def _own_validation(
    columns: Columns,
    train: Shards,
    own_test: Shards | None,
    pooled: Tensor,
    in_blocks: Shards | None,
    clients: ClientsSpec,
    key: int,
) -> tuple[Shards, Shards | None]:
    """Replace each client's own test rows with a share of its training rows. Return the remaining and the moved rows.

    If the validation rows of each client are blocks, these are its own too, since other training rows are beside them.

    Raises:
        RecipeError: there are no validation rows to measure on.
    """
    if len(pooled) == 0 or (own_test is not None and clients.validation == 0.0):
        raise RecipeError(
            "clients.measure_on = 'validation' needs validation rows: set clients.validation, as in "
            "clients.validation = 0.1",
            ("clients", "measure_on"),
        )
    if own_test is None or in_blocks is not None:
        return train, None if own_test is None else in_blocks
    return hold_out(train, columns, clients.validation, keys.key(key, "own validation"))


def matched(columns: Columns, train: Shards, key: int) -> Shards:
    """Draw test rows for each client from the global test set, in the label proportions of its training rows.

    If a client has 5 % of all training rows, its number of test rows is about 5 % of the size of the test set. The
    client gets fewer rows if one of its classes is too rare in the test set. For each of its classes that occurs in the
    test set, it gets at least one row. A client gets no row twice, but two clients may get the same row. The FMML paper
    does not state how many test rows a client has (docs/partitions.md).

    Args:
        train: Training rows of each client.
        key: Key of the random numbers.

    Raises:
        RecipeError: The data has no global test set.
    """
    refuse_targets(columns, "[clients] personal_test = 'matched' draws rows by their class")
    label, test_rows = columns.label.cpu(), columns.rows(TEST)
    if len(test_rows) == 0:
        raise RecipeError(
            f"clients.personal_test = 'matched' needs a global test set; data '{columns.name}' has none",
            ("clients", "personal_test"),
        )
    available = torch.bincount(label[test_rows], minlength=columns.num_classes).double()
    counts = train.counts(label, columns.num_classes).double() * (available > 0)
    share = counts / counts.sum(1, keepdim=True).clamp(min=1.0)
    target = (train.sizes * len(test_rows) / max(1, len(train.rows))).round()
    # the largest size at which no class needs more rows than exist
    limit = torch.where(share > 0, available / share, torch.inf).amin(1)
    wanted = torch.minimum(_rounded(share, torch.minimum(target, limit).floor()).clamp(min=1.0), available)
    wanted = (wanted * (share > 0)).long()
    rows, owners = [], []
    for number in range(columns.num_classes):
        pool = test_rows[label[test_rows] == number]
        draw = keys.generator(keys.key(key, number))
        pool = pool[torch.from_numpy(draw.permutation(len(pool)))]
        owner = torch.repeat_interleave(torch.arange(len(train)), wanted[:, number])
        # a slice of the shuffled class from a random start: the rows are distinct within a client, and this is cheap
        first = torch.from_numpy(draw.integers(0, max(1, len(pool)), len(train)))[owner]
        begin = (wanted[:, number].cumsum(0) - wanted[:, number])[owner]
        rows.append(pool[(first + torch.arange(len(owner)) - begin) % max(1, len(pool))])
        owners.append(owner)
    order = torch.cat(owners).argsort(stable=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), wanted.sum(1).cumsum(0)])
    return Shards(offsets, torch.cat(rows)[order])


def _rounded(share: Tensor, size: Tensor) -> Tensor:
    """Return whole numbers near `share * size` (K, C) that sum to `size` (K,), by the largest-remainder method."""
    exact = share * size[:, None]
    order = torch.argsort(exact - exact.floor(), dim=1, descending=True, stable=True)
    rank = torch.argsort(order, dim=1)
    return exact.floor() + (rank < (size - exact.floor().sum(1))[:, None])


def _roles(columns: Columns, clients: ClientsSpec) -> Tensor:
    """Return what each row is to its client, int8 (N,): a code of `Columns.split_personal`, or `OWN_VALIDATION`.

    Rows that are no training rows of the table have -1. Random shares are drawn after the partition, so their rows are
    training rows here.
    """
    roles = torch.where(columns.split.cpu() == TRAIN, OWN_TRAIN, -1).to(torch.int8)
    if clients.personal_test == "split_personal":
        if columns.split_personal is None:
            raise RecipeError(
                f"clients.personal_test = 'split_personal', but data '{columns.name}' has no such array; give a "
                "share, such as 0.25, or 'matched'",
                ("clients", "personal_test"),
            )
        roles = torch.where(roles == OWN_TRAIN, columns.split_personal.cpu().to(torch.int8), roles)
    if clients.row_split == "random":
        return roles
    shares = clients.drawn_shares
    if columns.person is not None and shares:
        raise RecipeError(
            "[clients] row_split = 'blocks' holds out the last rows of each class, and so divides persons, whom [data] "
            "person keeps whole. Set row_split = 'random', or remove person",
            ("clients", "row_split"),
        )
    blocks = [(OWN_TEST if option == "personal_test" else OWN_VALIDATION, share) for option, share in shares.items()]
    return held_out_blocks(columns, roles, blocks, clients.guard_rows)


def _with_notes(columns: Columns, clients: ClientsSpec, roles: Tensor) -> Columns:
    """Return the table with notes about persons, and about the rows beside blocks, which are left out."""
    warn_of_divided(columns, roles)
    columns = replace(columns, notes=(*columns.notes, *told_of_persons(columns)), unread_names={})
    if clients.row_split == "random" or not clients.drawn_shares:
        return columns
    count = int((roles == GUARD).sum())
    beside = counted(count, "row beside them is", "rows beside them are")
    of = "class of each client" if columns.client is not None else "class"
    note = (
        f"the last rows of each {of}, in the order of the table, are held out for {' and '.join(clients.drawn_shares)} "
        f"(row_split), and {beside} left out (guard_rows = {clients.guard_rows})"
    )
    return replace(columns, notes=(*columns.notes, note))


def _holds(columns: Columns, clients: ClientsSpec, train: Shards, key: int) -> Tensor:
    """Return which modalities each client holds, bool (K, M).

    A client holds a modality if [clients] assigns it to the client and at least one training row of the client has it.
    """
    holds = assign(clients, tuple(columns.modalities), len(train), key)
    for place, name in enumerate(columns.modalities):
        if name in columns.present:
            holds[:, place] &= train.counts(columns.present[name].cpu().long(), 2)[:, 1] > 0
    return holds


def _check_partition(partition: Partition, shards: Shards, rows: np.ndarray, num_rows: int) -> None:
    """Raise RecipeError unless the partition returned only rows that it received, each at most once."""
    given = np.zeros(num_rows, dtype=np.bool_)  # a byte for each row: counts would be the peak of a run's memory
    given[rows] = True
    used = shards.rows.numpy()
    if len(used) == 0 or (used.min() >= 0 and used.max() < num_rows and given[used].all()):
        given[used] = False
        if given.sum() == len(rows) - len(used):
            return
        wrong = int(np.flatnonzero(np.bincount(used) > 1)[0])
        fault = "twice"
    else:
        outside = (used < 0) | (used >= num_rows)
        wrong = int(used[outside][0] if outside.any() else used[~given[used]][0])
        fault = "that it was not given"
    raise RecipeError(
        f"clients.partition: {type(partition).__name__}.split returns row {wrong} {fault}. It must return each of "
        "the given rows at most once",
        ("clients", "partition"),
    )


def _check(population: Population, clients: ClientsSpec) -> None:
    """Raise an error if a client has no row or no modality, or if a round needs more clients than exist."""
    empty = (population.train.sizes == 0).nonzero()[:, 0]
    if len(population.train) == 0 or len(empty):
        who = f"client {int(empty[0])} has no training rows" if len(empty) else "there are no clients"
        raise DataError(f"{who}; use fewer clients, a larger clients.min_size or another partition")
    bare = (~population.holds.any(1)).nonzero()[:, 0]
    if len(bare):
        raise DataError(
            f"client {int(bare[0])} has no modality ({len(bare)} such clients): its rows lack the modalities "
            "that it may hold. Change clients.missing, only, keep_both, holdings or missing_rows, or the arrays of "
            "present rows"
        )
    for name, held in zip(population.columns.modalities, population.holds.any(0).tolist(), strict=True):
        there = population.columns.present.get(name)
        if not held or (there is not None and not bool(there[population.train.rows].any())):
            warnings.warn(
                f"no client has training rows with {name}: its encoder stays untrained, and evaluations still read it. "
                "Leave it out, as in [data] modalities, or change [clients]",
                PolyfedWarning,
                stacklevel=3,
            )
    count = clients.participation
    if isinstance(count, int) and count > population.num_clients:
        raise RecipeError(
            f"clients.participation = {count}, but there are {population.num_clients} clients",
            ("clients", "participation"),
        )
    if population.columns.labelled:
        _warn_of_labels(population)


def _warn_of_labels(population: Population) -> None:
    """Warn if all training rows have one label, or if a class occurs in test rows only."""
    label, rows = population.columns.label.cpu(), population.train.rows
    only = label[rows[0]]
    # piece by piece: the first piece nearly always decides, and a copy of all labels would be the peak of memory
    if all(bool((label[piece] == only).all()) for piece in torch.split(rows, 65_536)):
        warnings.warn(
            f"all training rows have label {only.tolist()}: nothing can be learnt", PolyfedWarning, stacklevel=4
        )
    if label.is_floating_point():
        return
    trained = _classes(label, rows, population.columns.num_classes)
    tested = _classes(label, population.test_rows, population.columns.num_classes)
    if unseen := (tested & ~trained).nonzero()[:, 0].tolist():
        names = population.columns.class_names
        listed = ", ".join(str(number) if names is None else f"'{names[number]}'" for number in unseen[:5])
        listed += ", ..." if len(unseen) > 5 else ""
        warnings.warn(
            f"data '{population.columns.name}': {counted(len(unseen), 'class has', 'classes have')} test rows and no "
            f"training row ({listed}), so no model can predict them. Check the splits",
            PolyfedWarning,
            stacklevel=4,
        )


def _classes(label: Tensor, rows: Tensor, num_classes: int) -> Tensor:
    """Return which classes occur in these rows, bool (C,)."""
    result = torch.zeros(num_classes, dtype=torch.bool)
    for piece in torch.split(rows, 65_536):
        result[label[piece]] = True
    return result
