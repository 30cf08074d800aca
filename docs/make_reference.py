"""Write docs/recipes.md from the docstrings of the dataclasses that are the schema: `make docs`."""

import re
from pathlib import Path

from polyfed.algorithms import ALGORITHMS, Averaging
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.cli.printing import catalogue
from polyfed.data import SOURCES
from polyfed.data.sources import Source
from polyfed.experiment.recipes.conflicts import every_row
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.model import ENCODERS

HEAD = """# Recipes

A recipe is a TOML file whose sections are the dataclasses of what they configure; `make docs` writes this page from
their docstrings. `--set section.key=value` overrides a key on the command line, where a key such as `*` needs quotes:
`--set 'egress."*".server=["parameters"]'`. An unknown key is an error that suggests the nearest one. The keys `seed`
(default 1) and `rounds` (default 10) come before the sections. `[egress.*]` is the policy of the clients
([egress.md](egress.md)).

Each entry has a key with its default, in brackets the type or the allowed values, and what it is for. The default
`none` is a key that is left out. `polyfed algorithms NAME` prints the values that a search tries.

More about single sections: [clients](partitions.md) and [missing rows](missing.md), [model](models.md) and
[encoders](data.md#encoders-that-fit), [evaluate](evaluation.md) and [task](evaluation.md#choose-a-task),
[network](network.md), [wire](network.md#compressed-messages), [attack](robustness.md),
[secure_aggregation](secure-aggregation.md), [privacy](privacy.md),
[limits](egress.md), [engine](performance.md), [deployment](deploy-reference.md), [checkpoint](outputs.md).
"""

PUBLISHED = """`polyfed data NAME` explains these keys, and prints the layout of the folder or file `path`, which
can also be a folder of [prepared features](data.md#media-data-sets-extract-features-once).
"""

INTRODUCTIONS = {
    "data": """In any `[data]`, `stack = { image = ["rgb", "gray"] }` puts modalities together before a model sees them
(early fusion): images along their channels, vectors along their features. `seed` is the same in all runs.
""",
    "algorithm": """Each heading links to the page of the method. A `placebo` is a control of the same cost;
with `none` it is the method.
""",
}
"""What holds for all members of a group."""

PLAIN = ("str", "bool", "int", "float")
"""Types that a default shows, so that an entry need not name them."""

LEFT_OUT = ("kind", "participation", "overselect")
"""Fields that are no options."""

GROUPS = {"averaging": Averaging, "silos": Vertical}
"""Base classes of algorithms, whose options stand in one place."""

SIGNS = {
    "0 or more": "≥ 0",
    "1 or more": "≥ 1",
    "2 or more": "≥ 2",
    "0 (only the last round) or more": "≥ 0",
    "above 0": "> 0",
    "above 1": "> 1",
    "above 0, at most 1": "> 0, ≤ 1",
    "above 0 and below 1": "> 0, < 1",
    "from 0 up to, not including, 1": "≥ 0, < 1",
    "from 0 up to, not including, 0.5": "≥ 0, < 0.5",
}
"""Ranges as a reference writes them. Error messages have them in words."""


SAID = re.compile(
    r", or a folder of prepared features(?=\.)|, the same in all runs|(?<=`) is a control(?: of the same cost)?(?=:)"
    r"|a control of the same cost[^:`]*: | `none`(?:, the default,)? is the method(?: of the paper)?\.| \(docs/[^)]*\)"
    r"|; see docs/[\w./-]+(?=\.)"
)
"""Phrases that an introduction says once for all, and pages that the page links to."""


def type_in_toml(kind: str) -> str:
    """A type of Python in the words of TOML."""
    kind = re.sub(r"tuple\[([^,\]]+(?:\[[^\]]*\])?), \.\.\.\]", r"list[\1]", kind)
    return re.sub(r"(?:Mapping|dict)\[str, (.*)\]", r"table of \1", kind).replace(" of Any", "")


def entry(option: catalogue.Option) -> str:
    """An option as an entry of a list: key and default, what else it may be, and what it is for."""
    base, _, ranges = (option.kind, "", "") if "[" in option.kind else option.kind.partition(", ")
    kinds = [part for part in base.split(" | ") if part != "None"]
    named = all(part.startswith('"') and re.search(rf"[`\"]{part[1:-1]}[`\"]", option.about) for part in kinds)
    if named or base in ("Any", "str") or (base in PLAIN and option.default not in ("", "none")):
        kinds = []
    facts = ["required"] * (not option.default)
    facts += [f"{' or '.join(map(type_in_toml, kinds))} {SIGNS.get(ranges, ranges)}".strip()] * bool(kinds or ranges)
    key = f"{option.name} = {option.default}" if option.default else option.name
    words = SAID.sub("", option.about)
    about = "" if words == f"{option.default.strip('[]')}." else f": {words}"
    return f"- `{key}`" + f" ({', '.join(facts)})" * bool(facts and about) + about


def entries(options: list[catalogue.Option]) -> str:
    """Options as a Markdown list."""
    return "\n".join(map(entry, options)) + "\n" if options else "No options.\n"


def group(members: dict[str, tuple[str, list[catalogue.Option]]]) -> str:
    """The members of a registry, each with its options. Options that several share are listed once."""
    holders: dict[catalogue.Option, list[str]] = {}
    for name, (_, options) in members.items():
        for option in options:
            holders.setdefault(option, []).append(name)
    common = [option for option, names in holders.items() if len(names) > 1]
    names = [option.name for option in common]
    parts = ["### Options of several\n", entries(common)] if common else []
    for name, (about, options) in members.items():
        own = [option for option in options if option not in common]
        shared = ", ".join(
            f"`{option.name}`" if names.count(option.name) == 1 else f"`{option.name} = {option.default}`"
            for option in options
            if option in common
        )
        lines = [
            about,
            entries(own) if own or not shared else "",
            f"Shared: {shared}.\n" if shared else "",
        ]
        parts += [f"### {name}\n", *filter(None, lines)]
    return "\n".join(parts)


def methods() -> str:
    """The algorithms, each with the options that its group does not explain."""
    of_group = {name: catalogue.hyper_parameters(cls) for name, cls in GROUPS.items()}
    parts = [f"### Options of {name}\n\n{entries(options)}" for name, options in of_group.items()]
    for name, cls in sorted(ALGORITHMS.items()):
        options = catalogue.hyper_parameters(cls)
        lines = [f"### [{name}](algorithms/{name}.md)\n"]
        also = next((group for group, base in GROUPS.items() if issubclass(cls, base)), None)
        if also:
            shared = {option.name: option for option in of_group[also]}
            plain = {option.name: option.about for option in options if option.name in shared}
            changed = [o for o in options if o.name in shared and o.default != shared[o.name].default]
            brief = [o for o in changed if plain[o.name] == shared[o.name].about]
            options = [o for o in options if o.name not in shared or plain[o.name] != shared[o.name].about]
            values = f", with {' and '.join(f'`{o.name} = {o.default}`' for o in brief)}" if brief else ""
            lines += [f"Also [{also}](#options-of-{also}){values}.\n"]
        parts += [*lines, entries(options)] if options or not also else lines
    return "\n".join(parts)


def published(cls: type) -> bool:
    """Whether a class reads a published data set, whose layout `polyfed data NAME` prints."""
    return issubclass(cls, Source) and not cls.__module__.startswith("polyfed.data.sources.own.")


def published_sets() -> str:
    """The keys of the published data sets, which `polyfed data NAME` explains, as a list."""
    lines = []
    for name, cls in sorted(SOURCES.items()):
        keys = (f"`{option.name}{f' = {option.default}' * bool(option.default)}`" for option in catalogue.options(cls))
        lines += [f"- `{name}`: {', '.join(keys)}."] * published(cls)
    return "\n".join(["### Published data sets\n", PUBLISHED, *lines]) + "\n"


def conflicts() -> str:
    """The options that cannot go together, by what they cannot go with."""
    beside: dict[str, list[str]] = {}
    for owner, row in every_row():
        section, *option = row.key
        other = row.beside or (f"`{owner}`" if owner else "some algorithms")
        beside.setdefault(other, []).append(f"`[{section}]{''.join(f' {name}' for name in option)}`")
    return "\n".join(
        [
            "## Options that cannot go together\n",
            "`polyfed check` says which values it concerns, why, and what to do instead.\n",
            # the escape, because `[a]: b` on a line is the target of links named a
            *(
                f"- {other.replace('[', chr(92) + '[')}: {', '.join(dict.fromkeys(keys))}."
                for other, keys in beside.items()
            ),
        ]
    )


def reference() -> str:
    """The text of docs/recipes.md."""
    parts = [HEAD]
    named = [("Encoders", ENCODERS, '[model.encoders] NAME = { kind = "..." }')]
    for name, section in SECTIONS.items():
        if section.classes is not None and name != "algorithm":
            named.append((section.title, section.classes, f"[{name}] name"))
        elif section.classes is None and section.cls is not None:
            parts.append(f"## [{name}]\n\n{entries(catalogue.options(section.cls))}")
    for title, registry, place in named:
        members = {
            name: ("", catalogue.options(registry[name], LEFT_OUT))
            for name in sorted(registry)
            if not published(registry[name])
        }
        parts += [f"## {title}: `{place}`\n"]
        parts += [INTRODUCTIONS[key] for key in INTRODUCTIONS if place == f"[{key}] name"]
        parts += [group(members)]
        parts += [published_sets()] * (registry is SOURCES)
    parts += ["## Algorithms: `[algorithm] name`\n", INTRODUCTIONS["algorithm"], methods(), conflicts()]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(reference(), encoding="utf-8")
