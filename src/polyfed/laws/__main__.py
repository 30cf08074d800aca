"""`python -m polyfed.laws mine:FedDyn`: try a method on all laws. Exit code 0 if it keeps them, 1 if it breaks one."""

import argparse
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from polyfed.algorithms import ALGORITHMS
from polyfed.algorithms.base import Algorithm
from polyfed.core.errors import PolyfedError, PolyfedWarning, RecipeError, did_you_mean
from polyfed.core.registry import find
from polyfed.laws.checks import LAWS, Broken, Law, NotApplicable
from polyfed.laws.federation import Trial

KEPT, BROKEN, SKIPPED = "kept", "BROKEN", "skipped"
"""The verdicts."""


def verdict(law: Law, trial: Trial) -> tuple[str, str]:
    """Try a law. Return the verdict, and why a law is broken or skipped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolyfedWarning)  # the federation is too small for some methods
            law.check(trial)
    except NotApplicable as why:
        return SKIPPED, str(why)
    except (Broken, PolyfedError) as how:
        return BROKEN, str(how)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return BROKEN, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
    return KEPT, ""


def chosen(words: Sequence[str]) -> dict[str, Law]:
    """Return the laws of these names, or all.

    Raises:
        RecipeError: there is no such law.
    """
    for word in words:
        if word not in LAWS:
            raise RecipeError(f"--law {word}: there is no such law; {did_you_mean(word, LAWS)}")
    return {name: law for name, law in LAWS.items() if not words or name in words}


def lines(trial: Trial, laws: dict[str, Law]) -> Iterator[tuple[str, str]]:
    """Yield the verdict on each law and its line of the report."""
    width = max(map(len, laws))
    for name, law in laws.items():
        start = time.monotonic()
        found, why = verdict(law, trial)
        seconds = time.monotonic() - start
        line = f"{found:7}  {name:{width}}  {seconds:5.1f} s  {law.says}"
        yield found, f"{line}\n{'':9}{why}" if why else line


def main(words: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code: 0, 1 if a law is broken, or 2 if the call is wrong."""
    parser = argparse.ArgumentParser("python -m polyfed.laws", description="Try a method on the laws of polyfed.")
    parser.add_argument("method", metavar="module:Class", help="your method, or the name of a built-in one")
    parser.add_argument("--recipe", metavar="FILE.toml", type=Path, help="its options, policy and clients")
    parser.add_argument("--law", metavar="NAME", action="append", default=[], help="only this law; may be repeated")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    try:
        laws = chosen(args.law)
        kind = find(args.method, ALGORITHMS, Algorithm)
        trial = Trial(kind) if args.recipe is None else Trial.under(kind, args.recipe)
    except PolyfedError as error:
        sys.stderr.write(f"polyfed: {error}\n")
        return error.exit_code
    verdicts = []
    for found, line in lines(trial, laws):
        verdicts.append(found)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    kept, broken = verdicts.count(KEPT), verdicts.count(BROKEN)
    sys.stdout.write(f"{args.method}: {kept} laws kept, {broken} broken, {verdicts.count(SKIPPED)} skipped\n")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
