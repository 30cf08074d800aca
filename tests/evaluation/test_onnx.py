"""Models as ordinary modules and as ONNX files, beside the predictions of the run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from ended_runs import ended
from objective.made import KINDS, made_recipe
from polyfed.core.errors import ModelError, RecipeError
from polyfed.model import ModelSpec
from polyfed.objective import Objective, Regression
from polyfed.selection import Uniform
from refusals import refuses
from world import AWKWARD, PLAIN, algorithm, recipe

SPECS = {
    "encoders": ModelSpec(embedding=6, encoders=AWKWARD),
    "gated": ModelSpec(embedding=6, fusion="gated", encoders=PLAIN),
    "module": ModelSpec(module="own_models:Whole", blocks={"a": ("net_a",), "b": ("net_b", "bias_b")}),
}
X = {"a": torch.randn(5, 16, generator=torch.Generator().manual_seed(1)), "b": torch.ones(5, 24)}


@pytest.mark.parametrize("private", [(), ("shared",)], ids=["global", "private"])
@pytest.mark.parametrize("case", SPECS)
def test_a_module_and_an_onnx_file_compute_what_the_run_predicts(
    case: str, private: tuple[str, ...], tmp_path: Path
) -> None:
    told = recipe(algorithm("fedavg", private=private, selector=Uniform()), model=SPECS[case], rounds=1)
    run = polyfed.run(replace(told, clients=replace(told.clients, personal_test=0.3)))
    client = next(c for c, held in run.models.clients.items() if held == ("a", "b"))
    back = polyfed.load_model(
        run.export(tmp_path / "plain"), imports=["polyfed.laws.federation.*", "world.*", "own_models.*"]
    )
    who = client if private else None
    module = back.module(who)
    expected = run.predict(X, client=who)
    torch.testing.assert_close(module(X), expected, rtol=0, atol=0)
    torch.testing.assert_close(module(with_gaps()), run.predict(with_gaps(), client=who), rtol=0, atol=0)
    whole = {m: torch.ones(value.shape, dtype=torch.int64) for m, value in X.items()}
    torch.testing.assert_close(module(whole), run.predict(whole, client=who), rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    onnx = pytest.importorskip("onnx", reason="the extra polyfed[onnx] is not installed")
    from onnx.reference import ReferenceEvaluator

    folder = run.export(tmp_path / "onnx", onnx=True)
    path = folder / (f"client-{client:06d}.onnx" if private else "global.onnx")
    onnx.checker.check_model(onnx.load(path))
    told = {one.key: json.loads(one.value) for one in onnx.load(path).metadata_props}
    assert told["modalities"] == [one.name for one in onnx.load(path).graph.input]
    assert told["task"] == "classification"
    assert "classes" in told
    for x in (X, with_gaps()):
        (found,) = ReferenceEvaluator(str(path)).run(None, {m: value.numpy() for m, value in x.items()})
        torch.testing.assert_close(torch.from_numpy(found), run.predict(x, client=who), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["fedavg", "local"])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_and_onnx_files_of_every_task_compute_what_the_run_predicts(
    kind: str, method: str, tmp_path: Path
) -> None:
    task: Objective = Regression(shift=1.0, scale=2.0) if kind == "regression" else KINDS[kind]
    run = polyfed.run(replace(made_recipe(kind, method, task=task, selector=Uniform()), rounds=1))
    client = None if method == "fedavg" else 0
    x = {m: value[:, : {"a": 5, "b": 4}[m]] for m, value in with_gaps().items()}
    expected = run.predict(x, client=client)
    back = polyfed.load_model(run.export(tmp_path / "plain"))
    module = back.module(client)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=0)
    program = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(program(x), expected)
    pytest.importorskip("onnx", reason="the extra polyfed[onnx] is not installed")
    from onnx.reference import ReferenceEvaluator

    path = run.export(tmp_path / "onnx", onnx=True) / ("global.onnx" if client is None else "client-000000.onnx")
    (found,) = ReferenceEvaluator(str(path)).run(None, {m: x[m].numpy() for m in module.reads})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-4)


def with_gaps() -> dict[str, torch.Tensor]:
    """`X`, where some rows lack one of the modalities."""
    x = {m: value.clone() for m, value in X.items()}
    x["a"][1], x["b"][3:] = torch.nan, torch.nan
    return x


@pytest.mark.parametrize("case", SPECS)
def test_the_parameters_of_a_module_have_their_names_and_can_be_trained(case: str) -> None:
    run = polyfed.run(recipe(algorithm("fedavg"), model=SPECS[case], rounds=1))
    module = run.models.module()
    assert {f"tensors.{name}" for name in run.params} <= module.state_dict().keys()
    names = {name for name, _ in module.named_parameters()}
    assert names == {f"tensors.{name}" for name in run.models.model.trainable(run.params)}
    before = {name: value.clone() for name, value in run.params.items()}
    optimiser = torch.optim.SGD(module.requires_grad_().parameters(), lr=0.5)
    first = torch.nn.functional.cross_entropy(module(X), torch.zeros(5, dtype=torch.int64))
    first.backward()
    optimiser.step()
    assert torch.nn.functional.cross_entropy(module(X), torch.zeros(5, dtype=torch.int64)) < first
    assert all(torch.equal(value, before[name]) for name, value in run.params.items())


def test_without_the_package_the_text_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    run = polyfed.run(recipe(algorithm("fedavg"), rounds=1))
    with refuses(ModelError, "written as ONNX"):
        run.export(tmp_path / "m", onnx=True)
    assert not list(tmp_path.iterdir())


def test_a_model_that_predicts_by_prototypes_is_no_module() -> None:
    run: Any = ended("fedproto original")[0]
    with refuses(RecipeError, "predicts by NearestPrototype"):
        run.models.module(0)
