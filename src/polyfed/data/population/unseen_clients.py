"""Rows of people who take no part in training: `[clients] test_clients`, `folds` with `fold`, `validation_clients`.

A random split of rows puts windows of one person on both sides, and the score then tells how well the model knows this
person. Here, whole natural clients are held out, for every source.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import RecipeError, counted, did_you_mean
from polyfed.data.columns import LEFT_OUT, TEST, TRAIN, VALIDATION, Columns
from polyfed.data.population.clients import ClientsSpec
from polyfed.data.population.splits import DRAWN


def held_out(columns: Columns, clients: ClientsSpec, key: int) -> Columns:
    """Return the table with the rows of the test clients as its test set, and of others as validation rows.

    The rows of all other clients that the data marks as test rows become training rows; their validation rows stay.

    Args:
        clients: the section [clients].
        key: key of the draw of a share, and of the division into folds.

    Raises:
        RecipeError: the data names no natural clients, there is no such client, or nobody is left on one side.
    """
    tests = clients.test_clients is not None or clients.folds is not None
    if not tests and not clients.validation_clients:
        return columns
    option = "folds" if clients.folds is not None else "test_clients" if tests else "validation_clients"
    if columns.client is None:
        raise RecipeError(
            f"[clients] {option} holds out whole clients, but data '{columns.name}' does not say which rows belong to "
            f"whom. Name the array or column in [data] client, or remove {option}",
            ("clients", option),
        )
    client = columns.client.cpu().numpy()
    people = np.unique(client)
    split, notes = columns.split.cpu().clone(), columns.notes
    if tests:
        chosen = _chosen(people, clients, key, columns.client_names)
        tested = np.isin(client, chosen)
        split[(split == TEST) & torch.from_numpy(~tested)] = TRAIN
        split[torch.from_numpy(tested) & (split != LEFT_OUT)] = TEST
        people = people[~np.isin(people, chosen)]
        shown = ", ".join(_name_of(int(one), columns.client_names) for one in chosen[:MOST_NAMED])
        more = f" and {len(chosen) - MOST_NAMED} more" if len(chosen) > MOST_NAMED else ""
        notes = (
            *(note for note in notes if not note.startswith(DRAWN)),
            f"the test rows are those of the clients {shown}{more}, which take no part in training ({option})",
            *([_of_few(len(chosen), option, len(np.unique(client)))] if len(chosen) < FEW else []),
        )
        split, notes = _without_seen(columns, split, (TRAIN, VALIDATION), TEST, option, notes)
    if clients.validation_clients:
        people = np.unique(client[(split == TRAIN).numpy()])  # a split of the data may leave some without
        count = max(1, round(clients.validation_clients * len(people)))
        if count >= len(people):
            raise RecipeError(
                f"[clients] validation_clients = {clients.validation_clients}: of {len(people)} natural clients "
                "with training rows none would be left to train. Hold out fewer",
                ("clients", "validation_clients"),
            )
        held = people[keys.choice(keys.key(key, "validation clients"), len(people), count)]
        split[torch.from_numpy(np.isin(client, held)) & (split == TRAIN)] = VALIDATION
        split, notes = _without_seen(columns, split, (TRAIN,), VALIDATION, "validation_clients", notes)
    return replace(columns, split=split.to(columns.split), notes=notes)


def _without_seen(
    columns: Columns, split: Tensor, others: tuple[int, ...], held: int, option: str, notes: tuple[str, ...]
) -> tuple[Tensor, tuple[str, ...]]:
    """Leave out the rows that persons of held-out clients have at other clients, and add a note about them.

    Args:
        split: split codes, int8 (N,).
        others: the splits of these rows.
        held: the split of the held-out rows.
    """
    if columns.person is None:
        return split, notes
    seen = torch.isin(columns.person, columns.person[split == held])
    gone = seen & torch.isin(split, torch.tensor(others, dtype=split.dtype))
    if not (count := int(gone.sum())):
        return split, notes
    told = f"{counted(count, 'row is', 'rows are')} left out, because persons of held-out clients ({option}) have them "
    return split.masked_fill(gone, LEFT_OUT), (*notes, f"{told}at other clients ([data] person)")


FEW = 5
"""With fewer test clients, a note says that the score is about these people (ours)."""


def _of_few(count: int, option: str, total: int) -> str:
    who = "one client" if count == 1 else f"{count} clients"
    cure = (
        "read the mean over all folds"
        if option == "folds"
        else f"a study over fold = 1 to {total} with [clients] folds = {total} tests each client once"
    )
    return f"the score is about {who}, so another draw may give another score; {cure}"


MOST_NAMED = 6
"""The most test clients that a note names."""


def _name_of(number: int, names: tuple[str, ...] | None) -> str:
    return str(number) if names is None else names[number]


def _chosen(people: np.ndarray, clients: ClientsSpec, key: int, names: tuple[str, ...] | None) -> np.ndarray:
    """Return the numbers of the natural clients that are held out."""
    wanted, total = clients.test_clients, len(people)
    if clients.folds is not None:
        assert clients.fold is not None
        if clients.folds > total:
            raise RecipeError(
                f"[clients] folds = {clients.folds}: the data has {total} natural clients, and each fold needs one. "
                f"folds = {total} leaves one client out at a time",
                ("clients", "folds"),
            )
        order = keys.permutation(keys.key(key, "folds"), total).numpy()
        part: np.ndarray = np.array_split(order, clients.folds)[clients.fold - 1]
        return np.asarray(people[part])
    if isinstance(wanted, list):
        result = np.array([_number_of(one, people, names) for one in wanted])
    else:
        assert wanted is not None
        count = max(1, round(wanted * total))
        result = people[keys.choice(keys.key(key, "test clients"), total, count)]
    if len(set(result.tolist())) >= total:
        raise RecipeError(
            f"[clients] test_clients = {wanted}: all {total} natural clients would be test clients, and nobody would "
            "train. Hold out fewer",
            ("clients", "test_clients"),
        )
    return result


def _number_of(wanted: int | str, people: np.ndarray, names: tuple[str, ...] | None) -> int:
    """Return the number of a natural client, which may be given by name.

    Raises:
        RecipeError: there is no such client.
    """
    known = {} if names is None else {names[number]: int(number) for number in people}
    number = known.get(wanted) if isinstance(wanted, str) else wanted
    if number is not None and number in people:
        return number
    hint = did_you_mean(wanted, known) if isinstance(wanted, str) and known else ""
    raise RecipeError(
        f"[clients] test_clients = {wanted!r}: no such natural client. {f'{hint}. ' if hint else ''}"
        f"The data has the numbers {people[0]} to {people[-1]}, in the sorted order of their names",
        ("clients", "test_clients"),
    )
