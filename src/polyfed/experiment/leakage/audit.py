"""`polyfed audit`: attacks the data that clients sent in a run, and writes the result into the run's folder."""

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyfed.core.errors import RecipeError
from polyfed.core.messages import LABELS, OF_THE_MODEL, crossings
from polyfed.core.system.files import LEAKAGE, RECIPE, replace_text
from polyfed.core.system.json_and_toml import to_json
from polyfed.core.tree import SHARED
from polyfed.data.sources.own.memory import Memory
from polyfed.experiment.leakage import labels, membership, properties, reconstruction, words
from polyfed.experiment.leakage.capture import Capture, capture
from polyfed.experiment.leakage.findings import Finding, Target
from polyfed.experiment.leakage.membership import ALL
from polyfed.experiment.recipes.from_data import with_data
from polyfed.experiment.recipes.recipe import Recipe, load_recipe
from polyfed.privacy.egress.ledger import TO_CLIENT
from polyfed.report.reading import egress
from polyfed.report.reading.run_folder import Folder

READS = {
    labels.PRESENT: ("parameters", "gradients", "prototypes", "statistic"),
    labels.FREQUENT: ("parameters", "gradients", "statistic"),
    labels.EACH_ROW: ("embeddings", "predictions", "labels"),
    membership.MEMBERSHIP: ("parameters",),
    reconstruction.REBUILT: ("parameters", "gradients", "embeddings", "raw"),
    words.WORDS: ("parameters", "gradients"),
    properties.HELD: (properties.ANY,),
}
"""A map from each attack to the kinds that it reads. Of the kind `statistic`, the attacks read only class counts."""

NOTHING = {
    labels.PRESENT: "this block has no output layer",
    labels.FREQUENT: "this block has no output layer",
    labels.EACH_ROW: "it is not known which rows these entries describe",
    membership.MEMBERSHIP: "no client sent a model that reads this block",
    reconstruction.REBUILT: "this block has no linear first layer, or its rows are not known",
    words.WORDS: "this block has no table of embeddings",
    properties.HELD: "no client replied",
}
"""A map from each attack to the reason why it reads nothing from a kind that clients sent."""

NEEDS_CLASSES = (labels.PRESENT, labels.FREQUENT, labels.EACH_ROW)
"""Attacks on labels that are class numbers."""


@dataclass(frozen=True)
class LeakageAudit:
    """The result of `audit`.

    Attributes:
        folder: the folder of the run.
        algorithm: the name of the run's algorithm.
        dataset: the name of the data.
        seed: the seed of the run.
        rounds: the number of rounds that were run again.
        clients: the number of clients whose replies were attacked.
        shadows: the number of LiRA's shadow models for each client. If 0, membership is inferred only from the loss.
        defences: the sections of the recipe that change the replies.
        findings: one finding for each attack, kind, block, destination and method.
        notes: facts that a reader of the findings must know, as sentences without a full stop.
    """

    folder: Path
    algorithm: str
    dataset: str
    seed: int
    rounds: int
    clients: int
    shadows: int
    defences: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def content(self) -> dict[str, Any]:
        """Return the content of the file `leakage.json`, which `polyfed audit --json` also prints."""
        return asdict(self) | {"folder": str(self.folder)}


def audit(
    folder: str | Path, *, data: Any = None, rounds: int = 3, clients: int = 20, shadows: int = 0, **options: Any
) -> LeakageAudit:
    """Attack the messages of a run, after repeating the first rounds of its recipe in a simulation with the same seed.

    If the folder's recipe.toml names user-defined classes, this function imports them, which runs their code. Audit
    only runs that you trust.

    Args:
        folder: the folder of the run, which may be unfinished. The data of its recipe must be on this machine.
        data: the data of a run whose data was in memory, as in `polyfed.run(data=...)`.
        rounds: the number of rounds to run again.
        clients: the largest number of clients to attack. These are the first clients that reply.
        shadows: the number of LiRA's shadow models for each client. If 0, the only membership attack is the loss
            threshold.
        options: how to read `data`, such as `labels`, exactly as in the call of `polyfed.run`. Because `clients` has
            another meaning here, give the natural clients of the rows as `natural_clients`.

    Raises:
        DataError: the folder holds no run, or the data differs from the data of the run.
        RecipeError: the data was in memory and `data` is missing, or an option is unknown; `rounds` or `clients` is
            below 1, or `shadows` is 1 or negative.
    """
    for name, value in (("rounds", rounds), ("clients", clients)):
        if value < 1:
            raise RecipeError(f"--{name} {value}: give 1 or more")
    if shadows < 0 or shadows == 1:
        raise RecipeError(f"--shadows {shadows}: LiRA needs 2 or more shadow models. Give 0 for the loss threshold")
    run = Folder(Path(folder))
    crossed = {(block, kind, way) for block, kind, way in egress.aggregate(run).bytes}
    recipe = _with_data(load_recipe(run.path / RECIPE), data, options)
    result = capture(recipe, rounds, clients, run.facts.get("data", {}).get("sha256"))
    columns = result.population.columns
    table = recipe.table()
    findings = tuple(findings_of(result, crossed, shadows, recipe.seed))
    return LeakageAudit(
        folder=run.path,
        algorithm=table["algorithm"]["name"],
        dataset=columns.name,
        seed=recipe.seed,
        rounds=min(rounds, recipe.rounds),
        clients=len({reply.client for reply in result.replies}),
        shadows=shadows,
        defences=tuple(name for name in ("privacy", "secure_aggregation", "attack") if name in table),
        findings=findings,
        notes=tuple(_notes(recipe, findings)),
    )


def _with_data(recipe: Recipe, data: Any, options: dict[str, Any]) -> Recipe:
    """Return the recipe with the data of a run whose data was in memory."""
    if data is not None:
        if "natural_clients" in options:
            options["clients"] = options.pop("natural_clients")
        return with_data(recipe, data, options)
    if options:
        raise RecipeError(f"{next(iter(options))} is given without data. Give data=..., as in the call of polyfed.run")
    if isinstance(recipe.data, Memory):
        raise RecipeError(
            "the data of this run was in memory, so its folder does not hold it, and the command line cannot audit it. "
            "Audit it from Python: polyfed.experiment.leakage.audit(folder, data=..., labels=...), with the data and "
            "options of the run"
        )
    return recipe


def _notes(recipe: Recipe, findings: Collection[Finding]) -> Iterator[str]:
    """Yield the facts about the whole run that a reader of the findings must know."""
    if any(one.status == "measured" and one.remark == membership.AGAINST_TEST for one in findings):
        yield (
            f"WARNING: membership is measured against test rows, because there are fewer than "
            f"{membership.FEWEST_PUBLIC} validation rows. If test rows come from another source than training rows, "
            "the advantage also holds this difference. Set [clients] validation = 0.1 and run again"
        )
    if recipe.privacy is not None and recipe.privacy.central:
        yield (
            "The server adds the noise of [privacy] after it has received the replies. So this noise does not protect "
            "what is seen by the server, only what is seen by clients and by people who get the model"
        )


def write(result: LeakageAudit) -> Path:
    """Write `leakage.json` into the folder of the run, and return its path."""
    path = result.folder / LEAKAGE
    replace_text(path, to_json(result.content()))
    return path


def findings_of(
    found: Capture, crossed: Collection[tuple[str, str, str]], shadows: int, seed: int
) -> Iterator[Finding]:
    """Carry out all attacks. If an attack had nothing to attack, its finding gives the reason instead of numbers.

    Args:
        found: the captured replies.
        crossed: (block, kind, destination) of all data that the ledger of the run lists.
        shadows: see `audit`.
    """
    has_classes = not found.population.columns.label.is_floating_point()
    done: list[Finding] = []
    if has_classes:
        done += [*labels.classes_of_clients(found), *labels.labels_of_rows(found, seed)]
    done += [*membership.membership(found, shadows, seed), *reconstruction.samples_rebuilt(found, seed)]
    done += [*words.words_present(found), *properties.modalities_held(found)]
    done = [finding for finding in done if _crossed(finding, crossed)]
    sent = {(part.block, part.kind) for reply in found.replies for part in crossings(reply.message)}
    known = {(finding.attack, finding.kind, finding.block) for finding in done}
    for attack, kinds in READS.items():
        for kind in kinds:
            yield from (finding for finding in done if (finding.attack, finding.kind) == (attack, kind))
            for block in _blocks(found, attack, kind):
                if (attack, kind, block) not in known:
                    ways = {way for at, of, way in crossed if of == kind and block in (at, ALL) and way != TO_CLIENT}
                    there = any(of == kind and block in (at, ALL) for at, of in sent)
                    target = Target(attack, kind, block)
                    yield _of_columns(found, target, ways) or _unmeasured(target, ways, there, has_classes)


def _crossed(finding: Finding, crossed: Collection[tuple[str, str, str]]) -> bool:
    """Return whether the ledger of the run lists the block and the kind of a finding."""
    blocks = {at for at, kind, way in crossed if (kind, way) == (finding.kind, finding.seen_by)}
    return finding.kind == properties.ANY or finding.block in blocks or (finding.block == ALL and bool(blocks))


def _blocks(found: Capture, attack: str, kind: str) -> tuple[str, ...]:
    """Return the blocks from which an attack could read this kind of data."""
    modalities = tuple(found.population.columns.modalities)
    if attack == properties.HELD:
        return (ALL,)
    if attack == words.WORDS:
        return tuple(found.num_ids)
    if attack == membership.MEMBERSHIP:
        return (ALL, *modalities) if len(found.assembly.model.modalities) > 1 else (ALL,)
    if kind == "labels":
        return (LABELS,)
    whole = kind in OF_THE_MODEL and attack != reconstruction.REBUILT
    return (*modalities, SHARED) if whole or kind == "predictions" else modalities


def _of_columns(found: Capture, target: Target, ways: Collection[str]) -> Finding | None:
    """Return the finding about the statistics of a modality's columns, which hide nothing; None if it sends none."""
    column = found.population.columns.modalities.get(target.block)
    if target.kind != "statistic" or not ways or column is None or not column.features:
        return None
    result = "words, sums and counts of its columns cross as they are, before round 1: `polyfed check` lists them"
    return Finding(**vars(target) | {"seen_by": min(ways)}, status="no attack", remark=result)


def _unmeasured(target: Target, ways: Collection[str], there: bool, has_classes: bool) -> Finding:
    """Return the finding of an attack that was not carried out. Instead of numbers, the finding gives the reason."""
    place = vars(target) | {"seen_by": min(ways, default="server")}
    if not ways:
        return Finding(**place, status="did not cross")
    if not there:
        return Finding(**place, status="not in the audited rounds", remark="give more --rounds")
    if target.attack in NEEDS_CLASSES and not has_classes:
        return Finding(**place, status="no attack", remark="the labels are no classes")
    if target.kind == "statistic":
        return Finding(**place, status="did not cross", remark="statistics crossed, but no class counts")
    return Finding(**place, status="no attack", remark=NOTHING[target.attack])
