"""Puts the pages of docs/ into the wheel, for `polyfed docs`. An editable install reads those of its clone."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Pages(BuildHookInterface):  # type: ignore[type-arg]
    """Adds every Markdown file of docs/, but not the scripts beside them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by the build before it collects files."""
        if version == "standard":
            docs = Path(self.root) / "docs"
            pages = {str(page): f"polyfed/docs/{page.relative_to(docs)}" for page in sorted(docs.rglob("*.md"))}
            build_data["force_include"] |= pages
