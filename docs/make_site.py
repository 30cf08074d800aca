"""Build the site of the documentation, `make docs`: stage the pages, build them strictly, check what was built.

The pages of this repository link to each other as files, so that they can be read without the site: README.md to
docs/data.md, docs/python.md to examples/study.py. Staging puts them where the site wants them and turns the links with
them; a file outside of docs/ that a page links to becomes a page that shows it.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from check_site import problems

ROOT = Path(__file__).resolve().parents[1]
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside of docs/ and their places on the site."""

LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml", ".json": "json"}
DOWNLOAD = "\n[Download this notebook]({name}){{ download }}\n"
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")


@dataclass
class Staging:
    """Copies the documentation of `root` into `pages`, as the site wants it.

    Attributes:
        root: a checkout: README.md, docs/ and what they link to.
        pages: an empty folder.
        shown: files and folders outside of docs/ that a page links to, by their path in `root`.
    """

    root: Path
    pages: Path
    shown: dict[str, Path] = field(default_factory=dict)

    def place(self, path: Path) -> Path:
        """Where a file or folder of the checkout stands among the pages; `path` is relative to `root`."""
        if path.as_posix() in TOP:
            return Path(TOP[path.as_posix()])
        if path.parts[0] == "docs":
            inside = path.relative_to("docs")
            if (self.root / path).is_dir():
                return inside / "index.md"
            inside = inside.with_name("index.md") if inside.name == "README.md" else inside
            return inside.with_suffix(".md") if inside.suffix == ".ipynb" else inside
        return Path("files", *path.parts, "index.md") if (self.root / path).is_dir() else Path("files", f"{path}.md")

    def link(self, page: Path, target: str) -> str:
        """A link of `page` (relative to `root`) as it must be on the site. What leads nowhere is left to the build."""
        parts = urlsplit(target)
        if parts.scheme or not parts.path:
            return target
        found = Path(os.path.normpath(page.parent / unquote(parts.path)))
        if found.parts[0] == ".." or not (self.root / found).exists():
            return target
        outside = found.parts[0] != "docs" and found.as_posix() not in TOP
        if outside or (self.root / found).is_dir():
            self.shown[found.as_posix()] = found
        there = os.path.relpath(self.place(found), self.place(page).parent)
        return Path(there).as_posix() + (f"#{parts.fragment}" if parts.fragment else "")

    def turned(self, page: Path, text: str) -> str:
        """Markdown of `page` with its links turned; code stays as it is."""
        pieces, at = [], 0
        for code in [*FENCE.finditer(text), None]:
            prose = text[at : code.start() if code else len(text)]
            pieces.append(LINK.sub(lambda m: f"{m[1]}({self.link(page, m[2])})", prose))
            if code:
                pieces.append(code.group())
                at = code.end()
        return "".join(pieces)

    def write(self, place: Path, text: str) -> None:
        """Write one page."""
        path = self.pages / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self) -> None:
        """Stage every page, then what they link to."""
        docs = self.root / "docs"
        files = [path.relative_to(self.root) for path in sorted(docs.rglob("*")) if path.is_file()]
        for path in [Path(name) for name in TOP if (self.root / name).exists()] + files:
            text = self.root / path
            if path.suffix == ".md":
                self.write(self.place(path), self.turned(path, text.read_text(encoding="utf-8")))
            elif path.suffix == ".ipynb":
                self.write(self.place(path), self.turned(path, notebook_page(text)) + DOWNLOAD.format(name=path.name))
            if path.suffix not in (".md", ".py", ".pyc"):
                (self.pages / path.relative_to("docs")).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(text, self.pages / path.relative_to("docs"))
        while self.shown:
            _, path = self.shown.popitem()
            if not (self.pages / self.place(path)).exists():
                self.write(self.place(path), self.shown_page(path))

    def shown_page(self, path: Path) -> str:
        """A page that shows a file, or lists a folder."""
        source = self.root / path
        if source.is_file():
            fence = f"````{LANGUAGES.get(path.suffix, 'text')}\n{source.read_text(encoding='utf-8')}````\n"
            return f"# {path.as_posix()}\n\n{fence}"
        inside = [path / child.name for child in sorted(source.iterdir()) if child.is_file()]
        pages = [child for child in inside if child.parts[0] != "docs" or child.suffix in (".md", ".ipynb")]
        lines = [f"- [{self.title(child)}]({child.name})" for child in pages]
        return self.turned(path / "README.md", f"# {path.name.capitalize()}\n\n" + "\n".join(lines) + "\n")

    def title(self, path: Path) -> str:
        """The heading of a page, or the name of a file."""
        if path.suffix != ".md":
            return path.name
        heading = re.search(r"^# (.+)$", (self.root / path).read_text(encoding="utf-8"), re.MULTILINE)
        return heading[1] if heading else path.name


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, its code and what the code printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            shown = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            parts.append(f"```{{.text .output}}\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def configured(root: Path, build: Path) -> Path:
    """Write the configuration of `root` with the paths of this build; its path."""
    config = yaml.safe_load((root / "mkdocs.yml").read_text(encoding="utf-8"))
    plugins = {
        name: options for plugin in config["plugins"] if isinstance(plugin, dict) for name, options in plugin.items()
    }
    autonav, python = plugins["api-autonav"], plugins["mkdocstrings"]["handlers"]["python"]
    autonav["modules"] = [str(root / module) for module in autonav["modules"]]
    python["paths"] = [str(root / path) for path in python["paths"]]
    python["options"]["extensions"] = [str(root / path) for path in python["options"]["extensions"]]
    config |= {"docs_dir": "pages", "site_dir": "site"}
    path = build / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def built(root: Path, build: Path) -> list[str]:
    """Build the site of the checkout `root` into `build`/site; what is wrong with it, a line each."""
    build.mkdir(parents=True, exist_ok=True)
    for folder in ("pages", "site"):
        shutil.rmtree(build / folder, ignore_errors=True)
    Staging(root, build / "pages").run()
    words = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "--config-file",
        str(configured(root, build)),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if done.returncode:
        return [said.split("Traceback")[0].strip() or said]
    docstrings = [line for line in said.splitlines() if line.startswith("griffe:")]
    return docstrings + problems(build / "pages", build / "site")


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout whose documentation is built")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder for the site and what leads to it")
    given = parser.parse_args()
    wrong = built(given.root.resolve(), given.build.resolve())
    print("\n".join(wrong) if wrong else f"the site is in {given.build / 'site' / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
