"""A user who debugs a step sees a short stack: from `polyfed.run` to the optimiser's step."""

import traceback

import pytest

import polyfed
from polyfed.training.optimisers import Train
from world import algorithm, recipe

MOST_FRAMES = 15
"""Below `polyfed.run`, the optimiser's step included, and PyTorch's three for `vmap` on the vectorised engine."""


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_few_frames_lie_between_a_run_and_a_step(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    step = Train.step

    def watched(self, *args, **kwargs):
        names = [frame.name for frame in traceback.extract_stack()]
        seen.append(
            names[names.index("run", names.index("test_few_frames_lie_between_a_run_and_a_step")) + 1 :]
        )  # the last one is this function, in place of the step
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Train, "step", watched)
    polyfed.run(recipe(algorithm("fedavg"), engine, rounds=1))
    assert seen, "the run took no step"
    assert len(seen[0]) <= MOST_FRAMES, " > ".join(seen[0])
