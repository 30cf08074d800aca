"""The egress policy: the kinds of data that may leave a client, by block and destination.

A block is a modality, `shared` or `labels`. In a recipe or a policy file, a policy looks like this:

    [egress.audio]
    server = ["parameters"]
    silo = ["parameters", "embeddings"]
    [egress.labels]
    server = []

Each line inside a table is a row of the policy. A row in `[egress."*"]` applies to every modality that has no row of
its own for the destination. It does not apply to `shared` or `labels`.

If the policy has a row for a block and a destination, this row alone decides what the block may send there. Without a
row, a modality may send parameters, gradients of parameters and statistics, and `labels` may send nothing. The same
three kinds are the default for `shared`, but a kind is left out if any modality of the client may not send it. The
reason is that the shared layers read all modalities of the client, and gradients of these layers can reveal the data.

Most models mix the modalities (`privacy/egress/mixing.py`): the gradient of one modality's block holds the features of
other modalities. So the parameters and gradients of such a block need two permissions: what the modality may send, and
what `shared` may send.

A model that the server made can read a modality although none of its parameters leaves: the server sends the encoder
and asks how many rows it predicts correctly. So a block takes parameters and prototypes from the server only if it may
send them back, or if it may send its samples or their embeddings, which reveal more. A line `accept` allows others:

    [egress.audio]
    server = []
    accept = ["parameters"]

In a deployment, the policy is the client's own file. A recipe can only make this policy stricter.

A row of a column or an array that is no modality is a *guard*: nothing may read it but the modality of this very name.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from polyfed.core.errors import EgressError, RecipeError, did_you_mean
from polyfed.core.messages import DESTINATIONS, KINDS, LABELS, OF_THE_MODEL, Crossing
from polyfed.core.problems import Problems
from polyfed.core.tree import SHARED
from polyfed.privacy.egress.mixing import Mixing

DEFAULT = frozenset({"parameters", "gradients", "statistic"})
"""Kinds that may leave if there is no row. docs/egress.md gives the reason, and what these kinds can still reveal."""

ACCEPT = "accept"
"""The line of a row with the kinds that a block takes from the server although it may not send them."""

STEERING = ("parameters", "prototypes")
"""The kinds of a message that decide what a client's model predicts. A client takes them by permission only."""

REVEALING = frozenset({"raw", "embeddings"})
"""Kinds that reveal each row. If they may leave, a model of the server learns nothing that the rows do not tell."""

EVERY = "*"
"""The name of the row that applies to every modality without a row of its own."""

Table = Mapping[str, Mapping[str, Iterable[str]]]


@dataclass(frozen=True)
class Policy:
    """The rules of a client, or of all clients of a federation.

    Attributes:
        rules: (block, destination) -> the kinds of data that may go from this block to this destination. Pairs that the
            policy does not name are left out.
        owned: the modalities of the client, or None for all modalities of the federation. If the policy has no row for
            `shared`, the policy rows of these modalities limit what `shared` may send.
        mixing: the modalities whose blocks can reveal other modalities, and why. Parameters and gradients of these
            blocks may leave only if `shared` may send them too.
    """

    rules: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    owned: frozenset[str] | None = None
    mixing: Mixing = Mixing()

    @classmethod
    def parse(
        cls, table: Table, modalities: Iterable[str], where: str = "[egress]", guards: Collection[str] = ()
    ) -> "Policy":
        """Read the `egress` table of a recipe or of a client's own policy file.

        Args:
            table: for each block, the kinds by destination.
            modalities: the modalities that may have a row. A row `*` applies to modalities without a row of their own.
            where: the name of the table in error messages.
            guards: the columns and arrays that may have a row too. Such a row gives no block a permission; see
                `refuse_guarded`.

        Raises:
            RecipeError: a row, destination or kind is unknown. The text suggests the most similar name.
        """
        named = [name for name in modalities if name not in (SHARED, LABELS, EVERY)]
        rows = (*named, SHARED, LABELS, EVERY)
        rules: dict[tuple[str, str], frozenset[str]] = {}
        problems = Problems()
        for block, entry in table.items():
            if block not in rows and not any(alike(block, guard) for guard in guards):
                text = f"{where} has no row '{block}'; {did_you_mean(block, rows)}"
                problems.add(RecipeError(text, ("egress", block)))
                continue
            for destination, kinds in entry.items():
                if fault := _fault(destination, kinds, f"{where[:-1]}.{block}]"):
                    problems.add(RecipeError(fault, ("egress", block, destination)))
                elif block in rows:
                    rules[block, destination] = frozenset(kinds)
        problems.raise_all()
        wild = {destination: kinds for (block, destination), kinds in rules.items() if block == EVERY}
        spread = {(name, destination): kinds for name in named for destination, kinds in wild.items()}
        own = {place: kinds for place, kinds in rules.items() if place[0] != EVERY}
        return cls(spread | own)

    def for_client(self, modalities: Iterable[str]) -> "Policy":
        """Return the policy of a client with these modalities.

        If the policy has no row for `shared`, only the rows of these modalities limit what `shared` may send.
        """
        return replace(self, owned=frozenset(modalities))

    def for_model(self, modalities: Iterable[str], mixing: Callable[[Collection[str]], Mixing]) -> "Policy":
        """Return the policy of a client whose model reads these modalities.

        Args:
            modalities: the modalities that the model reads. Modalities that the client lacks have no effect.
            mixing: returns which blocks can reveal another of the given modalities. It can take seconds, so it is
                called only if `shared` may send less than a modality may send or may send by default.
        """
        read = [name for name in modalities if self.owned is None or name in self.owned]
        pairs = [(self._row(name, place), self._row(SHARED, place)) for name in read for place in DESTINATIONS]
        if all((own | DEFAULT) & {*OF_THE_MODEL} <= shared for own, shared in pairs):
            return self
        return replace(self, mixing=mixing(read))

    def kinds(self, block: str, destination: str) -> frozenset[str]:
        """Return the kinds that may go from this block to this destination."""
        own = self._row(block, destination)
        if block not in self.mixing.blocks:
            return own
        return own - (frozenset(OF_THE_MODEL) - self._row(SHARED, destination))

    def _row(self, block: str, destination: str) -> frozenset[str]:
        """Return the kinds that a block's row or default allows, whether or not the model mixes modalities."""
        if (block, destination) in self.rules:
            return self.rules[block, destination]
        if block == LABELS or destination == ACCEPT:
            return frozenset()
        return DEFAULT.intersection(*self._mixed(destination).values()) if block == SHARED else DEFAULT

    def _mixed(self, destination: str) -> dict[str, frozenset[str]]:
        """Return modality -> allowed kinds, from the policy rows of the client's modalities for a destination."""
        return {
            block: kinds
            for (block, place), kinds in self.rules.items()
            if place == destination and block not in (SHARED, LABELS) and (self.owned is None or block in self.owned)
        }

    def inherited(self, kinds: Collection[str], block: str, destination: str) -> str:
        """Return why other policy rows prevent a block from sending some of these kinds, or an empty text.

        If the policy has no row for `shared`, this block may send only the kinds that the rows of all modalities allow.
        The text then lists the modalities whose rows forbid any of these kinds. Kinds outside `DEFAULT` are not
        considered. If the model mixes modalities, a modality may send only the parameters and gradients that `shared`
        may send. The text then says so.
        """
        if block in self.mixing.blocks:
            lacking = {*kinds}.intersection(OF_THE_MODEL) - self._row(SHARED, destination)
            why = self.inherited(lacking, SHARED, destination)
            return (
                f"the model mixes the modalities: {self.mixing.why}. So the {' and '.join(sorted(lacking))} of "
                f"'{block}' can reveal the other modalities, and they may leave only if '{SHARED}' may send them "
                f"too{why and f'; {why}'}"
                if lacking
                else ""
            )
        if block != SHARED or (SHARED, destination) in self.rules:
            return ""
        strict = [m for m, allowed in self._mixed(destination).items() if (DEFAULT & {*kinds}) - allowed]
        if not strict:
            return ""
        rows = ", ".join(f"[egress.{modality}] {destination}" for modality in strict)
        return (
            f"without a row of its own, '{SHARED}' may send the {destination} only what every modality of the client "
            f"may, since its layers mix them; {rows} forbids it"
        )

    def allows(self, kind: str, block: str, destination: str) -> bool:
        """Return whether this kind may go from this block to this destination."""
        return kind in self.kinds(block, destination)

    def accepts(self, kind: str, block: str, destination: str) -> bool:
        """Return whether a block takes this kind from the server, in a request whose reply goes to the destination."""
        if kind not in STEERING or kind in self.kinds(block, destination) | self._row(block, ACCEPT):
            return True
        read = (self.owned or ()) if block == SHARED else (block,)
        return bool(read) and not any(self.kinds(name, destination).isdisjoint(REVEALING) for name in read)

    def allows_models(self, destination: str) -> bool:
        """Return whether a whole model may leave: the parameters of every modality and of `shared`."""
        named = {block for block, _ in self.rules} - {LABELS}  # the default applies to every other modality
        return all(self.allows("parameters", block, destination) for block in {SHARED, *named})

    def stricter(self, other: "Policy") -> "Policy":
        """Return the policy that allows only what both policies allow, such as a client's and a recipe's policy."""
        assert self.owned == other.owned, "policies of different clients"
        pairs = {*self.rules, *other.rules}
        rules = {pair: self.kinds(*pair) & other.kinds(*pair) for pair in pairs if pair[1] != ACCEPT}
        for block in {block for block, line in pairs if line == ACCEPT}:
            rules[block, ACCEPT] = self._taken(block) & other._taken(block)
        return replace(self, rules=rules)

    def _taken(self, block: str) -> frozenset[str]:
        """Return the kinds that a block takes from the server, whatever the destination of the reply is."""
        both = frozenset(KINDS).intersection(*(self.kinds(block, destination) for destination in DESTINATIONS))
        return self._row(block, ACCEPT) | both

    def table(self, modalities: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """Return the policy as a table with a row for every block and destination."""
        return {
            block: {
                place: [k for k in KINDS if k in self.kinds(block, place)]
                for place in DESTINATIONS + ((ACCEPT,) if self._row(block, ACCEPT) else ())
            }
            for block in (*modalities, SHARED, LABELS)
        }

    def fix(self, wanted: Collection[str], block: str, destination: str) -> str:
        """Return the line of a policy that would allow these kinds.

        If the model mixes modalities, two lines can be necessary: one for the modality and one for `shared`.
        """
        needs = {block: {*wanted}}
        if block in self.mixing.blocks and (
            also := {*wanted}.intersection(OF_THE_MODEL) - self._row(SHARED, destination)
        ):
            needs = {SHARED: also} if needs[block] <= self._row(block, destination) else needs | {SHARED: also}
        return " and ".join(self._line(name, kinds, destination) for name, kinds in needs.items())

    def _line(self, block: str, wanted: Collection[str], destination: str) -> str:
        kinds = [k for k in KINDS if k in wanted or k in self._row(block, destination)]
        listed = ", ".join(f'"{k}"' for k in kinds)
        return f"[egress.{block}] {destination} = [{listed}]"

    def explanations(self, refused: Iterable[tuple[str, str, str]]) -> Iterator[str]:
        """Yield sentences that explain why the policy rows of other blocks do not let data of a block leave the client.

        These are the sentences of `inherited`. There is at most one sentence for each block and destination.

        Args:
            refused: the (kind, block, destination) triples that the policy forbids.
        """
        kinds: dict[tuple[str, str], set[str]] = {}
        for kind, block, destination in refused:
            kinds.setdefault((block, destination), set()).add(kind)
        yield from filter(None, (self.inherited(wanted, *place) for place, wanted in kinds.items()))


def alike(row: str, column: str) -> bool:
    """Return whether a row of a policy means a column: letters may differ by case, and other marks count as `_`.

    >>> alike("crp_mg_l", "CRP mg/l")
    True
    """
    names = [re.sub(r"\W+", "_", name).strip("_").casefold() for name in (row, column)]
    return names[0] == names[1]


def refuse_guarded(table: Table, read: Mapping[str, Sequence[str]], where: str = "[egress") -> None:
    """Refuse to read a column or an array that has a policy row of its own, except as the modality of this name.

    Args:
        table: the policy.
        read: modality, or another use such as `labels` -> the columns that it reads.
        where: the beginning of the name of a row in the error text.

    Raises:
        EgressError: such a column is read. The text lists all of them.
    """
    guards = [row for row in table if row not in (SHARED, LABELS, EVERY)]
    lines = [
        f"{where}.{row}]: '{column}' has a policy row of its own, and {use} reads it. Take it out of {use}"
        for use, columns in read.items()
        for column in columns
        for row in guards
        if row != use and alike(row, column)
    ]
    if lines:
        raise EgressError("\n".join(dict.fromkeys(lines)))


def guards_among(rows: Iterable[str], modalities: Collection[str]) -> tuple[str, ...]:
    """Return the rows of a device's policy file that name none of these modalities and are no slip of the pen.

    Several sites may use one file, so it has rows of modalities that a recipe lacks. A row that resembles a modality
    without a row of its own is not among them: it would be refused, and not leave this modality unprotected.
    """
    rows = [*rows]
    bare, fixed = ([name for name in names if name not in rows] for names in (modalities, (SHARED, LABELS)))
    slips = {row for row in rows if get_close_matches(row, bare, 1, 0.65) or get_close_matches(row, fixed, 1, 0.8)}
    return tuple(row for row in rows if row not in modalities and row not in slips)


def _fault(destination: str, kinds: Iterable[str], where: str) -> str:
    """Return what is wrong with a line of a policy, or an empty text if the line is correct."""
    if destination not in (*DESTINATIONS, ACCEPT):
        return f"{where} has no destination '{destination}'; {did_you_mean(destination, (*DESTINATIONS, ACCEPT))}"
    if isinstance(kinds, str):
        return f'{where} {destination} must be a list, as in ["{kinds}"]'
    unknown = [kind for kind in kinds if kind not in KINDS]
    return f"{where} {destination}: no kind '{unknown[0]}'; {did_you_mean(unknown[0], KINDS)}" if unknown else ""


def refusal(crossing: Crossing, destination: str, policy: Policy, client: int | str, message: str) -> str:
    """Return the text of a refusal: client, field, kind, block, destination, and the line that would allow it."""
    fix = policy.fix((crossing.kind,), crossing.block, destination)
    why = policy.inherited((crossing.kind,), crossing.block, destination)
    return (
        f"client {client} refused to send {message}.{crossing.field}: {crossing.kind} of {crossing.block} "
        f"may not go to the {destination}{why and f' ({why})'}. It would leave if the client's policy said: {fix}"
    )


def rejection(crossing: Crossing, destination: str, policy: Policy, client: int | str, message: str) -> str:
    """Return why a client does not take a part of the server's message, or "" if it takes the part."""
    if policy.accepts(crossing.kind, crossing.block, destination):
        return ""
    kinds = policy.table((crossing.block,))[crossing.block].get(ACCEPT, [])
    listed = ", ".join(f'"{kind}"' for kind in (*kinds, crossing.kind))
    why = policy.inherited((crossing.kind,), crossing.block, destination)
    return (
        f"client {client} refused to take {message}.{crossing.field}: {crossing.kind} of {crossing.block} may not go "
        f"to the {destination}{why and f' ({why})'}, so the {destination} has none to send, and a model that it made "
        f"could read the data. It would be taken if the client's policy said: "
        f"[egress.{crossing.block}] {ACCEPT} = [{listed}]"
    )
