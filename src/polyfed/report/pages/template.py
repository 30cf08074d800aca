"""What all pages share: the environment of their templates, the files that they contain, and how they are written.

Nothing here imports PyTorch, as a server makes its page in a process without it.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from polyfed.core.errors import RecipeError
from polyfed.core.system.files import replace_text

GENERATOR = b'<meta name="generator" content="polyfed">'
"""The tag in the head of every page that polyfed writes. polyfed overwrites only pages that have this tag."""


def environment() -> Environment:
    """Return a jinja environment: it escapes every value, and an undefined name is an error."""
    made = Environment(
        loader=PackageLoader("polyfed.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"sort_keys": False}  # the order of the modalities determines their colours
    return made


@cache
def asset(name: str) -> str:
    """A file of the package that is copied into the page unchanged."""
    return files("polyfed.report").joinpath("assets", name).read_text(encoding="utf-8").strip()


def write_page(path: Path, text: str) -> Path:
    """Write a page, unless another file has its name.

    Returns:
        The path of the page.

    Raises:
        RecipeError: the file exists and is not a page of polyfed, or it cannot be written.
    """
    try:
        if path.is_file() and not _is_report(path):
            raise RecipeError(f"{path} exists and is no page of polyfed's. Choose another name, or move it away")
        replace_text(path, text)
    except OSError as error:
        raise RecipeError(f"cannot write {path}: {error.strerror or error}. Choose another folder") from None
    return path


def _is_report(path: Path) -> bool:
    """Whether the head of a file says that polyfed wrote the file."""
    with path.open("rb") as file:
        return GENERATOR in file.read(1000)
