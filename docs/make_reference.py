"""Write docs/recipes.md from the docstrings of the dataclasses that are the schema: `make docs`."""

from pathlib import Path

from polyfed.algorithms import ALGORITHMS
from polyfed.cli.printing import catalogue
from polyfed.experiment.recipes.sections import SECTIONS
from polyfed.model import ENCODERS

HEAD = """# Recipes

A recipe is a TOML file; each section is the dataclass of the part it configures. `make docs` writes this page from the
docstrings of these dataclasses. `--set section.key=value` overrides a key on the command line. A key such as `*` needs
quotes, as in `--set 'egress."*".server=["parameters"]'`. An unknown key is an error that suggests the nearest one. The
keys `seed` (default 1) and `rounds` (default 10) come before the sections.

In any `[data]`, `stack = { image = ["rgb", "gray"] }` puts modalities together before a model sees them (early fusion):
images along their channels, vectors along their features.

[egress.md](egress.md) explains `[egress.*]`, and [outputs.md](outputs.md) the files that a run writes.
"""


def escaped(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return text.replace("|", "\\|")


def table(options: list[catalogue.Option]) -> str:
    """Options as a Markdown table."""
    if not options:
        return "No options.\n"
    tried = ["" if option.search.startswith("not searched") else option.search for option in options]
    rows = [
        f"| `{option.name}` | {f'`{option.default}`' if option.default else 'required'} "
        f"| {escaped(option.kind)} | {f'{escaped(values)} | ' if any(tried) else ''}{escaped(option.about)} |"
        for option, values in zip(options, tried, strict=True)
    ]
    heads = ["| key | default | type | a search tries | |", "|---|---|---|---|---|"]
    return "\n".join([*(heads if any(tried) else ["| key | default | type | |", "|---|---|---|---|"]), *rows]) + "\n"


def group(members: dict[str, tuple[str, list[catalogue.Option]]]) -> str:
    """The members of a registry, each with a sentence and its options. Options that several share are listed once."""
    holders: dict[catalogue.Option, list[str]] = {}
    for name, (_, options) in members.items():
        for option in options:
            holders.setdefault(option, []).append(name)
    common = [option for option, names in holders.items() if len(names) > 1]
    parts = ["### Options of several\n", table(common)] if common else []
    for name, (about, options) in members.items():
        own = [option for option in options if option not in common]
        shared = ", ".join(f"`{option.name} = {option.default}`" for option in options if option in common)
        lines = [
            about,
            table(own) if own or not shared else "",
            f"Also, from the table above, {shared}.\n" if shared else "",
        ]
        parts += [f"### {name}\n", *filter(None, lines)]
    return "\n".join(parts)


def reference() -> str:
    """The text of docs/recipes.md."""
    parts = [HEAD]
    named = [("Encoders", ENCODERS, '[model.encoders] NAME = { kind = "..." }')]
    for name, section in SECTIONS.items():
        if section.classes is not None and name != "algorithm":
            named.append((section.title, section.classes, f"[{name}] name"))
        elif section.classes is None and section.cls is not None:
            parts.append(f"## [{name}]\n\n{table(catalogue.options(section.cls))}")
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
    parts += ["## Algorithms: `[algorithm] name`\n", group(methods)]
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "recipes.md").write_text(reference(), encoding="utf-8")
