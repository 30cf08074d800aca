"""The event `run-stopped`: every run that begins and does not finish tells its listeners why."""

from dataclasses import dataclass
from typing import Any

import pytest

from polyfed.algorithms.averaging import Averaging
from polyfed.core.errors import Diverged
from polyfed.experiment.running.events import INTERRUPTED
from polyfed.start import run
from polyfed.training.optimisers import Train
from world import algorithm, recipe


@dataclass(frozen=True, kw_only=True)
class Breaks(Averaging):
    """Raises an exception in round 2."""

    how: str = ""

    def round(self, state: Any, fed: Any) -> Any:
        if fed.round == 2:
            raise KeyboardInterrupt if self.how == INTERRUPTED else ZeroDivisionError(self.how)
        return super().round(state, fed)


def stops(made: Any, error: type[BaseException], *others: Any) -> list[dict[str, Any]]:
    seen: list[tuple[str, dict[str, Any]]] = []
    with pytest.raises(error):
        run(made, listeners=[*others, lambda event, **facts: seen.append((event, facts))])
    assert "run-started" in dict(seen)
    assert "run-finished" not in dict(seen)
    return [facts for event, facts in seen if event == "run-stopped"]


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [(INTERRUPTED, KeyboardInterrupt, INTERRUPTED), ("by 0", ZeroDivisionError, "ZeroDivisionError: by 0")],
)
def test_a_round_that_raises(how: str, error: type[BaseException], reason: str) -> None:
    assert stops(recipe(Breaks(how=how)), error) == [{"round": 2, "reason": reason}]


def test_training_that_diverges() -> None:
    (facts,) = stops(recipe(algorithm("fedavg", train=Train(lr=1e30, batch_size=16))), Diverged)
    assert facts["reason"].startswith("Diverged: round ")


def test_a_listener_that_fails_does_not_hide_the_error_of_the_run() -> None:
    def fails(event: str, **facts: Any) -> None:
        if event == "run-stopped":
            raise RuntimeError("the tracker is away")

    assert stops(recipe(Breaks(how="first")), ZeroDivisionError, fails) == []
