"""What Zensical does not do for the site: formulas as MathML, and checks of the pages that it has built."""

import re
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from math_core import LatexError, LatexToMathML

FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*(?:\\\((.*?)\\\)|\\\[(.*?)\\\])\s*</\1>', re.DOTALL)
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
"""Attributes whose target a browser loads by itself."""


@dataclass
class Links(HTMLParser):
    """The links of a page.

    Attributes:
        targets: every href and src.
        loaded: those that a browser fetches as it opens the page.
        listed: those in the navigation.
    """

    targets: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    depth: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take up the links of one tag."""
        self.depth += tag == "nav"
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.add(value)
                if (tag, name) in LOADS and ("rel", "canonical") not in attrs:
                    self.loaded.add(value)
                if self.depth:
                    self.listed.add(value)

    def handle_endtag(self, tag: str) -> None:
        """Leave a navigation."""
        self.depth -= tag == "nav"


def with_formulas(html: str) -> str:
    r"""A page with every formula, `\(...\)` or `\[...\]`, as MathML, which browsers show without any script.

    Raises:
        LatexError: a formula cannot be read.
    """
    convert = LatexToMathML(fancy_error=False).convert_with_local_state
    return FORMULA.sub(lambda m: convert(unescape(m[2] or m[3]), displaystyle=m[2] is None), html)


def inside(site: Path, path: Path) -> bool:
    """Whether a file of the site is there."""
    return path.exists() and path.resolve().is_relative_to(site.resolve())


def problems(pages: Path, site: Path) -> list[str]:
    """Turn the formulas of a built site into MathML, and say what is wrong with it, a line each.

    Links within the site must lead somewhere (Zensical looks at links to pages, not at images), nothing may be loaded
    from the internet, and every page must stand in the navigation.
    """
    wrong: dict[str, list[str]] = {}
    listed: set[Path] = set()
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        text = path.read_text(encoding="utf-8")
        try:
            path.write_text(with_formulas(text), encoding="utf-8")
        except LatexError as error:
            wrong.setdefault(f"a formula cannot be read: {error}", []).append(name)
        links = Links()
        links.feed(text)
        for target in sorted(links.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in links.loaded and parts.scheme != "data":
                    wrong.setdefault(f"loads {target}, but the site must open without the internet", []).append(name)
            elif parts.path and name != "404.html" and not inside(site, path.parent / unquote(parts.path)):
                wrong.setdefault(f"links to {target}, which does not exist", []).append(name)
        listed |= {(path.parent / unquote(urlsplit(target).path)).resolve() for target in links.listed}
    for page in sorted(pages.rglob("*.md")):
        place = page.relative_to(pages)
        if place.parts[0] != "files" and (site / place.with_suffix(".html")).resolve() not in listed:
            wrong.setdefault("stands nowhere in the navigation, see docs/.nav.yml", []).append(place.as_posix())
    return [
        f"{places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}: {what}" for what, places in wrong.items()
    ]
