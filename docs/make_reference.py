"""Write docs/recipes.md from the docstrings of the dataclasses that are the schema: `make docs`."""

import re
from pathlib import Path

from polyfed.algorithms import ALGORITHMS
from polyfed.cli.printing import catalogue
from polyfed.experiment.recipes.conflicts import every_row
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.model import ENCODERS

HEAD = """# Recipes

A recipe is a TOML file; each section is the dataclass of the part it configures. `make docs` writes this page from the
docstrings of these dataclasses. `--set section.key=value` overrides a key on the command line. A key such as `*` needs
quotes, as in `--set 'egress."*".server=["parameters"]'`. An unknown key is an error that suggests the nearest one. The
keys `seed` (default 1) and `rounds` (default 10) come before the sections.

In any `[data]`, `stack = { image = ["rgb", "gray"] }` puts modalities together before a model sees them (early fusion):
images along their channels, vectors along their features.

Each entry has a key with its default, in brackets the allowed values, and what it is for; `none` is a key that is left
out. Members of a group name after "Shared" the options that the group explains; "Search" has the values that a search
tries.

[egress.md](egress.md) explains `[egress.*]`, and [outputs.md](outputs.md) the files that a run writes.
"""


PLAIN = ("str", "bool", "int", "float")
"""Types that a default shows, so that an entry need not name them."""


def entry(option: catalogue.Option) -> str:
    """An option as an entry of a list: key and default, what else it may be, and what it is for."""
    base, _, ranges = (option.kind, "", "") if "[" in option.kind else option.kind.partition(", ")
    kinds = [part for part in base.split(" | ") if part != "None"]
    named = all(part.startswith('"') and re.search(rf"[`\"]{part[1:-1]}[`\"]", option.about) for part in kinds)
    if named or base == "Any" or (base in PLAIN and option.default not in ("", "none")):
        kinds = []
    facts = ["required"] * (not option.default) + [" or ".join(kinds)] * bool(kinds) + [ranges] * bool(ranges)
    key = f"{option.name} = {option.default}" if option.default else option.name
    tried = f" Search: {option.search}." * bool(option.search and not option.search.startswith("not searched"))
    return f"- `{key}`" + f" ({', '.join(facts)})" * bool(facts) + f": {option.about}{tried}"


def entries(options: list[catalogue.Option]) -> str:
    """Options as a Markdown list."""
    return "\n".join(map(entry, options)) + "\n" if options else "No options.\n"


def group(members: dict[str, tuple[str, list[catalogue.Option]]]) -> str:
    """The members of a registry, each with a sentence and its options. Options that several share are listed once."""
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


def conflicts() -> str:
    """The options that cannot go together, as a list."""
    lines = []
    for owner, row in every_row():
        section, *option = row.key
        other = row.beside or (f"`{owner}`" if owner else "some methods")
        why = row.because.format(method=owner or "the method", detail="the method or the task says why")
        what = f"`[{section}]{''.join(f' {name}' for name in option)}`"
        lines.append(f"- {what} with {other}: {why}.")
    return "\n".join(["## Options that cannot go together\n", *dict.fromkeys(lines)]) + "\n"


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
            name: ("", catalogue.options(registry[name], ("kind", "participation", "overselect")))
            for name in sorted(registry)
        }
        parts += [f"## {title}: `{place}`\n", group(members)]
    methods = {
        name: (
            f"{catalogue.headline(ALGORITHMS[name])} [Its page](algorithms/{name}.md).\n",
            catalogue.hyper_parameters(ALGORITHMS[name]),
        )
        for name in sorted(ALGORITHMS)
    }
    parts += ["## Algorithms: `[algorithm] name`\n", group(methods), conflicts()]
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(reference(), encoding="utf-8")
