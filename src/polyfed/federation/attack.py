"""Simulated attacks by malicious clients: the [attack] section. Use them to measure robust aggregation rules.

With `scaling`, `sign-flip` and `alie`, an attacker changes its reply. With `label-flip`, an attacker trains on false
labels. With `backdoor`, it trains on rows with a trigger and may also change its reply. Attacks exist in simulations
only. docs/robustness.md describes them.
"""

import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from polyfed.core import keys
from polyfed.core.errors import PolyfedWarning, RecipeError
from polyfed.core.messages import Message, map_fields, tensors
from polyfed.core.option_checks import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, PROBABILITY, check_ranges
from polyfed.core.request import Send
from polyfed.data import Population
from polyfed.federation.backdoor import Trigger, poisoned
from polyfed.federation.outliers import COMPARED
from polyfed.federation.replies import Answer, ReplyStack


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The clients that attack, and the attack that they carry out: the [attack] section of a recipe.

    The update of a client is the difference between the parameters that it returns and those that it received.

    Attributes:
        name: `scaling` multiplies the attacker's update by `scale`, `sign-flip` by -`scale`. `alie` shifts the mean of
            the attackers' updates as far as the replies still look honest (Baruch et al., NeurIPS 2019). `label-flip`
            trains on label C - 1 - y (Tolpegin et al., ESORICS 2020, flip one class). `backdoor` trains on some rows
            with a trigger and the label `target`, and multiplies the update by `scale` (Bagdasaryan et al., AISTATS
            2020).
        share: share of all clients that attack, rounded to a number and drawn from the run's seed.
        clients: the numbers of the clients that attack, in place of `share`.
        scale: the factor of `scaling`, `sign-flip` and `backdoor`.
        modality: the modality that carries the trigger of `backdoor`; empty for the first modality of the data.
        target: the class that the model should predict for a row with the trigger.
        poisoned: share of an attacker's rows that get the trigger. Bagdasaryan et al. use 20 of the 64 rows of a batch.
        trigger_size: number of entries of a sample that the trigger covers, at the end of the flattened sample.
    """

    name: Literal["scaling", "sign-flip", "alie", "label-flip", "backdoor"]
    share: Annotated[float, PROBABILITY] = 0.2
    clients: tuple[int, ...] = ()
    scale: Annotated[float, POSITIVE] = 1.0
    modality: str = ""
    target: Annotated[int, NOT_NEGATIVE] = 0
    poisoned: Annotated[float, PROBABILITY] = 0.3125
    trigger_size: Annotated[int, AT_LEAST_ONE] = 4

    def __post_init__(self) -> None:
        """Check that every value lies in its declared range."""
        check_ranges("[attack]", self)

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect, each with the setting that causes this."""
        own = ("modality", "target", "poisoned", "trigger_size")
        used = {"scaling": ("scale",), "sign-flip": ("scale",), "backdoor": ("scale", *own)}.get(self.name, ())
        unused = {option: f"name = '{self.name}'" for option in ("scale", *own) if option not in used}
        return unused | ({"share": "clients"} if self.clients else {})

    def attackers(self, num_clients: int, seed: int) -> frozenset[int]:
        """Return the numbers of the clients that attack.

        Raises:
            RecipeError: `clients` holds a number that no client has, or `share` is above 0 but so small that the
                rounded number of attackers is 0.
        """
        if unknown := [client for client in self.clients if not 0 <= client < num_clients]:
            raise RecipeError(
                f"[attack] clients = {unknown[0]}: clients have the numbers 0 to {num_clients - 1}",
                ("attack", "clients"),
            )
        if self.clients:
            return frozenset(self.clients)
        count = round(self.share * num_clients)
        if self.share and not count:
            raise RecipeError(
                f"[attack] share = {self.share:g}: of {num_clients} clients, this share rounds to 0 attackers. For one "
                f"attacker, set share = {1 / num_clients:.2g}, or name it, as in clients = [0]",
                ("attack", "share"),
            )
        return _drawn(num_clients, count, seed)

    def poison(self, population: Population, seed: int) -> Population:
        """Return the population, with the attackers' false rows if the attack is `label-flip` or `backdoor`.

        Raises:
            RecipeError: the attack does not fit the data, or `clients` or `share` has a wrong value; see `attackers`.
                `label-flip` and `backdoor` need clients that share no rows, because one client alone could not change a
                shared row. `label-flip` also needs labels that are classes, because it exchanges classes. For
                `backdoor`, see also `Trigger.of` and `poisoned`.
        """
        attackers = self.attackers(population.num_clients, seed)
        if self.name == "alie" and len(attackers) == 1:
            text = (
                "[attack] name = 'alie' has one attacker and therefore no effect: it shifts the mean of the attackers "
                "by their standard deviation, which is 0 for a single attacker. Raise share, or list more clients"
            )
            warnings.warn(text, PolyfedWarning, stacklevel=2)
        if self.name not in ("label-flip", "backdoor"):
            return population
        if population.silo is not None:
            raise RecipeError(
                f"[attack] name = '{self.name}' needs clients that share no rows, but silos do", ("attack", "name")
            )
        columns = population.columns
        if self.name == "backdoor":
            return poisoned(population, self.trigger(population), attackers, self.target, self.poisoned, seed)
        if not columns.labelled or columns.label.is_floating_point():
            raise RecipeError(
                "[attack] name = 'label-flip' exchanges classes, and the labels of this task are no classes. Choose "
                "another attack, such as 'sign-flip'",
                ("attack", "name"),
            )
        lies = torch.zeros(population.num_clients, dtype=torch.bool)
        lies[list(attackers)] = True
        label, train = columns.label.clone(), population.train
        flipped = train.rows[lies[train.owner]]
        label[flipped] = columns.num_classes - 1 - label[flipped]
        return replace(population, columns=replace(columns, label=label))

    def trigger(self, population: Population) -> Trigger:
        """Return the trigger of `backdoor` for a data set.

        Raises:
            RecipeError: the data has no such modality, or the trigger is larger than a sample.
        """
        return Trigger.of(population, self.modality, self.trigger_size)

    @property
    def falsifies(self) -> bool:
        """Whether attackers change what they send, and not only what they train on."""
        return self.name != "label-flip" and not (self.name == "backdoor" and self.scale == 1.0)

    def falsify(self, answer: Answer, send: Send, attackers: Collection[int]) -> Answer:
        """Return the answer to a request, with the attackers' replies replaced by false ones.

        False are all real numbers of the kinds in `COMPARED`: parameters, gradients, embeddings, prototypes,
        predictions and samples. An update is counted from what the client was sent under the same name. Where it was
        sent nothing, the whole value is the update.
        """
        there = [client for part in answer.parts for client in part.clients if client in attackers]
        if not self.falsifies or not there:
            return answer
        change = self._little_is_enough(answer, there) if self.name == "alie" else self._multiply
        return Answer([_changed(part, send, attackers, change) for part in answer.parts], answer.missing)

    def _multiply(self, field: str, key: str | None, sent: Tensor | None, own: Tensor) -> Tensor:
        factor = -self.scale if self.name == "sign-flip" else self.scale
        return own * factor if sent is None else sent + factor * (own - sent)

    def _little_is_enough(self, answer: Answer, there: Sequence[int]) -> Any:
        """Return a function that gives the attackers' false values (Baruch et al., Algorithm 3).

        A false value is m - z * s. Here m and s are the mean and the standard deviation of the attackers' own values.
        Fields with one entry for each row have no common shape; m and s are then taken over the rows of all attackers.
        """
        num, lying = sum(len(part.clients) for part in answer.parts), len(there)
        supporters = num // 2 + 1 - lying
        share = (num - lying - supporters) / max(num - lying, 1)
        z = NormalDist().inv_cdf(min(max(share, 1e-3), 1 - 1e-3))
        found: dict[tuple[str, str | None], list[Tensor]] = {}
        for part in answer.parts:
            for name, key, stack in _attacked(part.message):
                by_row = _by_row(part.message, name)
                for i in (i for i, client in enumerate(part.clients) if client in there):
                    own = stack[i, : _num_rows(part.message, name, i)] if by_row else stack[i].unsqueeze(0)
                    found.setdefault((name, key), []).append(own)
        joined = {entry: torch.cat(own) for entry, own in found.items()}
        false = {entry: own.mean(0) - z * own.std(0, correction=0) for entry, own in joined.items() if len(own)}
        return lambda field, key, sent, own: false[field, key].expand_as(own) if (field, key) in false else own


def cure(attack: Attack | None) -> str:
    """Return what the user can do after training has diverged, as a sentence without a full stop."""
    if attack is not None:
        return (
            f"The recipe has [attack] name = '{attack.name}': a robust rule such as [server] aggregate = 'median' helps"
        )
    return (
        "Lower [train] lr, set [train] clip_norm, or scale the features down. In a regression, also bring every target "
        "near mean 0 and standard deviation 1"
    )


@lru_cache(maxsize=16)
def _drawn(num_clients: int, count: int, seed: int) -> frozenset[int]:
    """Draw the attackers of a run. The result is cached, because every request needs it."""
    return frozenset(keys.choice(keys.key(seed, "attackers"), num_clients, count))


def _attacked(message: Message) -> Iterator[tuple[str, str | None, Tensor]]:
    """Yield the tensors of a message that attackers falsify, with the names of their fields and in their trees."""
    for name, key, value in tensors(message):
        said = message.declared[name]
        if said.kind in COMPARED and not said.masked and value.is_floating_point():
            yield name, key, value


def _by_row(message: Message, field: str) -> bool:
    """Return whether the first axis of a client's tensors holds rows, whose number differs from client to client."""
    said = message.declared[field]
    return said.rows is not None or bool(said.shape and said.shape[0] is None)


def _num_rows(message: Message, field: str, place: int) -> int | None:
    """Return the number of rows without padding of one client in a stack; None if the field has no padding."""
    count = message.declared[field].rows
    return None if count is None else int(getattr(message, count)[place])


def _changed(part: ReplyStack, send: Send, attackers: Collection[int], change: Any) -> ReplyStack:
    """Return the stack with false values at the positions of the attackers."""
    places = [i for i, client in enumerate(part.clients) if client in attackers]
    wanted = {(name, key) for name, key, _ in _attacked(part.message)}
    if not places or not wanted:
        return part

    def false(name: str, key: str | None, stack: Tensor) -> Tensor:
        if (name, key) not in wanted:
            return stack
        new = stack.clone()
        for i in places:
            got = send if isinstance(send, Message) else send[part.clients[i]]
            value = getattr(got, name, None)
            sent = value if isinstance(value, Tensor) or value is None else value.get(key)
            new[i] = change(name, key, sent if sent is not None and sent.shape == new[i].shape else None, new[i])
        return new

    def lie(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return false(name, None, value)
        return {key: false(name, key, stack) for key, stack in value.items()}

    return ReplyStack(part.clients, map_fields(part.message, lie))
