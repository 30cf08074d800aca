"""A small study on made-up data, whose runs take a tenth of a second."""

from pathlib import Path
from typing import Any, Self

import pytest

from polyfed.core.errors import RecipeError
from polyfed.experiment.study.plan import planned
from polyfed.experiment.study.pool import Message
from polyfed.experiment.study.worker import carry_out

RECIPE = """seed = 1
rounds = 2

[data]
name = "toy"

[clients]
num = 4
validation = 0.25

[model]
fusion = "concat"
embedding = 4
[model.encoders]
a = { kind = "mlp", hidden = [4] }
b = { kind = "mlp", hidden = [4] }

[train]
lr = 0.05
batch_size = 16

[algorithm]
name = "fedavg"
"""


def refused(study: dict[str, Any]) -> str:
    """The error with which a study is refused before any run."""
    with pytest.raises(RecipeError) as told:
        planned(study)
    return str(told.value)


def write_recipe(folder: Path) -> str:
    """The name of a recipe in this folder."""
    (folder / "recipe.toml").write_text(RECIPE)
    return "recipe.toml"


def table(folder: Path, **changes: Any) -> dict[str, Any]:
    """The table of a study: FedAvg and FedProx on two seeds."""
    write_recipe(folder)
    study = {"recipe": str(folder / "recipe.toml"), "seeds": [1, 2], "methods": {"fedavg": {}, "fedprox": {}}}
    return study | changes


class HerePool:
    """A pool that carries out its runs in this process, which saves the start of another one."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.messages: list[Message] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def drop(self) -> None:
        self.messages.clear()

    @property
    def running(self) -> int:
        return len(self.messages)

    def refusal(self) -> str:
        return "one at a time" if self.messages else ""

    def start(self, job: str, recipe: dict[str, Any], folder: Path, until: int = 0) -> None:
        def tell(event: str, **facts: Any) -> None:
            self.messages.append(Message(job, event, facts))

        carry_out({"recipe": recipe, "folder": str(folder), "until": until}, tell)

    def message(self, seconds: float) -> Message:
        return self.messages.pop(0)
