"""What a first user meets with data and models of their own: missing rows, clients that fail, options of the engine."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import polyfed
from data.tiny_models import WORDS, text_model
from experiment.test_from_data import AUDIO, DATA, LABEL, OPTIONS, ROWS, TEXT
from polyfed.algorithms.averaging.fedavg import FedAvg
from polyfed.core.batch import Batch
from polyfed.core.errors import DataError, ModelError, PolyfedWarning, RecipeError
from polyfed.core.tree import Tree
from polyfed.federation.context import ClientContext
from polyfed.model import ModelSpec
from refusals import refuses, warned

HALF = np.where(np.arange(ROWS)[:, None] < ROWS // 2, np.nan, TEXT).astype(np.float32)


class Whole(nn.Module):
    """A whole model over two modalities."""

    def __init__(self, shapes: Any, num_outputs: int) -> None:
        super().__init__()
        self.audio, self.text = nn.Linear(6, num_outputs), nn.Linear(4, num_outputs)

    def forward(self, x: dict[str, Tensor], present: dict[str, Tensor]) -> Tensor:
        return sum(getattr(self, m)(x[m]) * present[m].unsqueeze(1) for m in ("audio", "text"))


class Failing(FedAvg):
    """FedAvg whose clients without text raise an exception."""

    def loss(self, context: ClientContext, w: Tree, batch: Batch, got: Any, local: Tree) -> Any:
        if "text" not in context.modalities:
            raise IndexError("index out of range in self")
        return super().loss(context, w, batch, got, local)


def test_a_row_of_nan_lacks_the_modality_in_predict_as_in_training() -> None:
    run = polyfed.run(data=DATA | {"text": HALF}, **OPTIONS)
    found = run.predict({"audio": AUDIO, "text": HALF})
    there = ~np.isnan(HALF).all(1)
    assert torch.equal(found, run.predict({"audio": AUDIO, "text": np.nan_to_num(HALF)}, present={"text": there}))
    assert torch.equal(found[: ROWS // 2], run.predict({"audio": AUDIO[: ROWS // 2]}))
    assert not torch.equal(found, run.predict({"audio": AUDIO}))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_row_that_is_partly_nan_or_infinite_is_refused_by_predict(wrong: float) -> None:
    run = polyfed.run(data=DATA, **OPTIONS)
    text = TEXT.copy()
    text[7, 1] = wrong
    with refuses(RecipeError, "partly"):
        run.predict({"audio": AUDIO, "text": text})
    with refuses(RecipeError, "a ndarray"):
        run.predict(AUDIO)  # type: ignore[arg-type]


def test_options_of_the_engine_can_be_given_beside_the_data() -> None:
    run = polyfed.run(data=DATA, engine={"name": "sequential", "threads": 1}, **OPTIONS)
    assert run.result["engine"] == "sequential"
    with refuses(RecipeError, "engine.debugg: option"):
        polyfed.run(data=DATA, engine={"debugg": True}, **OPTIONS)
    with refuses(RecipeError, "'fast'"):
        polyfed.run(data=DATA, engine="fast", **OPTIONS)


@pytest.mark.parametrize("form", ["class in a dictionary", "object in a dictionary", "ModelSpec"])
def test_a_model_of_ones_own_can_be_given_as_a_class_or_an_object(form: str) -> None:
    blocks = {"audio": ["audio"], "text": ["text"]}
    model: Any = {
        "class in a dictionary": {"module": Whole, "blocks": blocks},
        "object in a dictionary": {"module": Whole({}, 3), "blocks": blocks},
        "ModelSpec": ModelSpec(module=Whole, blocks={m: tuple(p) for m, p in blocks.items()}),
    }[form]
    run = polyfed.run(data=DATA, model=model, **OPTIONS)
    assert run.result["num_parameters"] == (6 + 1 + 4 + 1) * 3
    with refuses(RecipeError, "model.block: option"):
        polyfed.run(data=DATA, model={"module": Whole, "block": blocks}, **OPTIONS)


def test_a_modality_that_no_client_trains_is_warned_of() -> None:
    with warned("untrained"):
        polyfed.run(data=DATA, labels=LABEL, clients={"num": 3, "holdings": [["audio"]]}, rounds=1)
    split = np.array(["train"] * 60 + ["test"] * 30)
    text = np.where(np.arange(ROWS)[:, None] < 60, np.nan, TEXT).astype(np.float32)
    with warned("client has training"):
        polyfed.run(data=DATA | {"text": text}, labels=LABEL, clients=3, split=split, rounds=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolyfedWarning)
        polyfed.run(data=DATA | {"text": HALF}, **OPTIONS)


def test_a_client_that_fails_in_every_round_is_warned_of() -> None:
    clients = {"num": 3, "holdings": [["audio", "text"], ["audio", "text"], ["audio"]]}
    with warned("clients gave"):
        polyfed.run(data=DATA, algorithm=Failing(), **(OPTIONS | {"clients": clients}))


def test_token_ids_beyond_a_backbones_vocabulary_are_refused_before_training(tmp_path: Path) -> None:
    path = str(text_model(tmp_path / "bert"))
    ids = np.random.default_rng(0).integers(0, len(WORDS), (ROWS, 6))
    options: dict[str, Any] = {"labels": LABEL, "clients": 3, "rounds": 1}
    model = {"encoders": {"words": {"kind": "hf", "path": path}}}
    polyfed.check(polyfed.make_recipe({"words": ids}, model=model, **options))
    for wrong in (len(WORDS) + 4, -5):
        bad = ids.copy()
        bad[17, 2] = wrong
        with refuses(DataError, f"0 to {len(WORDS) - 1}"):
            polyfed.check(polyfed.make_recipe({"words": bad}, model=model, **options))
    with refuses(ModelError, "loaded") as caught:
        polyfed.check(
            polyfed.make_recipe(
                {"words": ids}, model={"encoders": {"words": {"kind": "hf", "path": "bertt"}}}, **options
            )
        )
    assert "connect" not in str(caught.value)
