"""The pages of `polyfed algorithms [NAME]`, `polyfed data [NAME]` and `polyfed recipes`."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from polyfed.algorithms import ALGORITHMS
from polyfed.cli.printing import catalogue
from polyfed.cli.printing.catalogue import Option
from polyfed.data import SOURCES
from polyfed.experiment.checks.egress_tables import Carrier, carriers
from polyfed.report.text_layout import plain_table, stacked, titled


def algorithm_list() -> Group:
    """Every algorithm with the first line of its description."""
    table = plain_table("", "", left=2)
    for name in sorted(ALGORITHMS):
        table.add_row(name, Text(catalogue.headline(ALGORITHMS[name])))
    return titled("Algorithms, by the name in [algorithm]", table)


def algorithm_page(name: str) -> Group:
    """One algorithm: its idea, its hyper-parameters, and the data that can leave a client."""
    cls = catalogue.algorithm_named(name)
    groups: dict[tuple[str, str, str], list[Carrier]] = {}
    for row in catalogue.crossings(cls):
        groups.setdefault((row.way, row.kind, row.blocks), []).append((row.task, row.field))
    crossing = plain_table("way", "kind", "of", "in (task)", left=4)
    for (way, kind, blocks), rows in sorted(groups.items(), key=lambda item: item[0][0] != "down"):
        crossing.add_row(way, kind, blocks, Text(carriers(rows)))
    options = _options("[algorithm]", catalogue.hyper_parameters(cls))
    protection = plain_table("", "", left=2)
    for section, words in catalogue.protection(cls).items():
        protection.add_row(Text(section), Text(words))
    hint = Text(
        "This holds for the default options; `polyfed check RECIPE.toml` shows bytes and verdicts for a recipe.", "dim"
    )
    tables = (titled("What can cross", crossing), titled("Protection of what crosses", protection))
    return stacked(Text(catalogue.explanation(cls)), options, *tables, hint)


def source_list() -> Group:
    """Every data source with its title and licence."""
    table = plain_table("name", "", "licence", left=3)
    for name in sorted(SOURCES):
        facts = catalogue.facts_of_source(SOURCES[name])
        table.add_row(name, Text(facts.title), Text(facts.licence))
    return titled("Data sources, by the name in [data]", table)


def listed(title: str, rows: Sequence[Mapping[str, str]], hint: str) -> Group:
    """Everything of a kind that comes with polyfed, by `name` and `about`, and how to go on with one of them."""
    table = plain_table("", "", left=2)
    for row in rows:
        table.add_row(row["name"], Text(row["about"]))
    return stacked(titled(title, table), Text(hint, "dim"))


def source_page(name: str) -> Group:
    """One data source: its modalities, its licence, how to obtain it, and its options."""
    cls = catalogue.source_named(name)
    facts = catalogue.facts_of_source(cls)
    table = plain_table("", "", left=2)
    for modality, about in facts.modalities.items():
        table.add_row(Text(f"modality {modality}"), Text(about))
    for what, about in (("licence", facts.licence), ("obtain", facts.obtain), ("files", facts.layout)):
        table.add_row(what, Text(about))
    return stacked(titled(f"{name}: {facts.title}", table), _options("[data]", catalogue.options(cls)))


def _options(section: str, options: Sequence[Option]) -> RenderableType:
    if not options:
        return Text(f"{section} has no options.")
    table = plain_table("key", "default", "type", "", left=4)
    for option in options:
        tried = option.search and not option.search.startswith("not searched")
        about = f"{option.about} [a search tries {option.search}]" if tried else option.about
        table.add_row(option.name, Text(option.default or "(required)"), Text(option.kind), Text(about))
    return titled(f"Options of {section}", table)
