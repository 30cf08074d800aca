"""Create a virtual environment for each compared framework, once, in the cache folder."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Peer:
    """A framework to compare with: the packages that pip installs besides PyTorch, and the script that runs it."""

    name: str
    requirement: str
    script: str


PEERS = (
    Peer("pfl 0.6", "pfl==0.6.0", "run_pfl.py"),
    Peer("Flower 1.41", "flwr[simulation]>=1.41,<1.42", "run_flower.py"),
)


class Unavailable(Exception):
    """An environment could not be created; the message says why."""


def python_of(peer: Peer, cache: Path) -> Path:
    """The interpreter of the framework's environment, which is created if it does not exist yet.

    Raises:
        Unavailable: pip failed, with the end of what it said.
    """
    folder = cache / "environments" / peer.script.removesuffix(".py")
    python, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists() and ready.read_text() == peer.requirement:
        return python
    print(f"making the environment of {peer.name} in {folder}", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, TORCH, "--index-url", TORCH_INDEX],
        [*pip, peer.requirement],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"{peer.name}: `{' '.join(command[-4:])}` failed: {done.stderr.strip()[-300:]}")
    ready.write_text(peer.requirement)
    return python
