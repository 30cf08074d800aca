"""Run the notebooks of docs/tutorials: `make notebooks` keeps what they print, `--check` tells what has changed.

Only text is kept, no pictures, times or numbers of cells: a notebook in git changes only when what it shows does.
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

TUTORIALS = Path(__file__).resolve().parent / "tutorials"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook after a run in a folder and a kernel of its own, with the text that its cells printed.

    Raises:
        CellExecutionError: a cell failed.
        ValueError: a cell wrote to standard error, such as a warning.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}})
        # the kernel warns of its ports, which are on the loopback interface only
        client.extra_arguments = ["--IPKernelApp.log_level=ERROR"]
        client.execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            text = "".join(said(path, output) for output in cell.outputs)
            cell.outputs = [nbformat.v4.new_output("stream", text=text)] if text else []
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def said(path: Path, output: nbformat.NotebookNode) -> str:
    """The text of one output."""
    if output.output_type == "stream":
        if output.name == "stderr":
            raise ValueError(f"{path.name} writes to standard error: {output.text}")
        return str(output.text)
    return f"{output.data['text/plain']}\n"


def shown(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell shows, with # for every number and single spaces: it is the same on every machine."""
    outputs = ["".join(output.text for output in cell.get("outputs", [])) for cell in notebook.cells]
    return [" ".join(NUMBER.sub("#", text).split()) for text in outputs]


def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=sorted(TUTORIALS.glob("*.ipynb")))
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a cell shows other words")
    given = parser.parse_args()
    failed = 0
    for path in given.paths:
        try:
            now = executed(path)
        except (CellExecutionError, ValueError) as error:
            print(f"{path.name}: {error}")
            failed = 1
            continue
        if not given.check:
            nbformat.write(now, path)
            continue
        kept = nbformat.read(path, as_version=4)
        for cell, before, after in zip(now.cells, shown(kept), shown(now), strict=True):
            if before != after:
                print(f"{path.name}: {cell.id} showed\n{before}\nand now shows\n{after}\nRun `make notebooks`.")
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
