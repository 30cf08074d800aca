"""`[model] init`: the initial model of a run comes from another run or file, whole or by block, frozen or not."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import polyfed
from polyfed.core.errors import DataError, NotAllowed, RecipeError
from polyfed.core.registry import Allowance, only
from polyfed.core.tree import blocks, digest, select
from polyfed.experiment.recipes.recipe import Recipe, parse_recipe
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.warm_start import COPY, given_of
from refusals import refuses
from world import AWKWARD, PLAIN, algorithm, recipe, same


def warm(init: Path | str, encoders: Any = PLAIN, name: str = "fedavg", **model: Any) -> Recipe:
    made = recipe(algorithm(name), "vectorised", encoders, rounds=2)
    model = {"init": str(init)} | model
    return replace(made, model=replace(made.model, **model), seed=7)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with BatchNorm, in the folders `run` (its files), `model` (exported), and the file `tree`."""
    folder = tmp_path_factory.mktemp("source")
    done = polyfed.run(recipe(algorithm("fedavg"), "vectorised", AWKWARD), folder / "run")
    done.export(folder / "model")
    save_file(dict(done.params), folder / "tree.safetensors")
    return folder


@pytest.mark.parametrize("form", ["run", "model", "tree.safetensors"])
def test_every_form_of_a_source_gives_its_parameters_and_buffers(form: str, source: Path) -> None:
    made = assemble(warm(source / form, AWKWARD))
    assert same(made.initial, polyfed.load_run(source / "run").params)


def test_only_the_named_blocks_are_filled(source: Path) -> None:
    given, plain = assemble(warm(source / "run", AWKWARD, init_blocks=("a",))), assemble(warm("", AWKWARD))
    params = polyfed.load_run(source / "run").params
    assert same(select(given.initial, ["a"]), select(params, ["a"]))
    assert same(select(given.initial, ["b", "shared"]), select(plain.initial, ["b", "shared"]))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("block", ["a", "shared"])
def test_a_frozen_block_neither_trains_nor_crosses_and_every_other_one_does(
    block: str, engine: str, source: Path, tmp_path: Path
) -> None:
    made = warm(source / "run", AWKWARD, freeze=(block,))
    made = replace(made, engine=replace(made.engine, name=engine))
    done = polyfed.run(made, tmp_path / "run")
    params = polyfed.load_run(source / "run").params
    assert block not in blocks(done.params)
    assert set(blocks(done.params)) == {"a", "b", "shared"} - {block}
    assert same(done.model.unsent, select(params, [block]))
    for other in blocks(done.params):
        assert not same(select(done.params, [other]), select(params, [other]))
    entries = (tmp_path / "run" / "egress.jsonl").read_text()
    assert f'"block":"{block}","kind":"parameters"' not in entries.replace(" ", "")
    x = {"a": torch.randn(3, 5), "b": torch.randn(3, 5)}
    x = {m: torch.randn(3, *shape) for m, shape in done.model.shapes.items()} if done.model.shapes else x
    done.export(tmp_path / "model")
    again = polyfed.load_model(tmp_path / "model", imports=["polyfed.laws.federation:NormAndDropout"])
    assert torch.equal(again.predict(x), done.predict(x))
    then = assemble(warm(tmp_path / "run", AWKWARD))
    assert same(select(then.initial, [block]), select(params, [block])), "a source with a frozen block is whole"
    assert same(assemble(warm(tmp_path / "model", AWKWARD)).initial, then.initial)


def test_engines_agree_with_a_frozen_block(source: Path) -> None:
    made = warm(source / "run", AWKWARD, freeze=("b",))
    many = polyfed.run(made)
    one = polyfed.run(replace(made, engine=replace(made.engine, name="sequential")))
    for name, value in one.params.items():
        assert torch.allclose(value, many.params[name], atol=1e-5), name


@pytest.mark.parametrize("name", ["fedavg", "local"])
def test_a_run_needs_its_source_only_once(name: str, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source / "run", copy)
    made = warm(copy, AWKWARD, name=name, freeze=("a",))
    whole = polyfed.run(replace(made, rounds=4))
    polyfed.run(made, tmp_path / "run")
    shutil.rmtree(copy)
    assert digest(given_of(made, tmp_path / "run")) == digest(given_of(warm(source / "run", AWKWARD)))
    assert polyfed.load_run(tmp_path / "run").model.frozen
    more = polyfed.run(replace(made, rounds=4), tmp_path / "run", resume=True)
    assert more.result["state_sha256"] == whole.result["state_sha256"]
    torch.manual_seed(0)
    save_file({n: v + 1 for n, v in given_of(made, tmp_path / "run").items()}, tmp_path / "run" / COPY)
    with refuses(DataError, "cannot resume"):
        polyfed.run(replace(made, rounds=5), tmp_path / "run", resume=True)


def test_devices_start_from_the_values_that_the_app_carries(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.devices import RECIPE, Devices

    polyfed.run(_text(tmp_path / "first.toml", RECIPE), tmp_path / "first", engine="sequential")
    text = RECIPE.replace("embedding = 6", f'embedding = 6\ninit = "{tmp_path / "first"}"\nfreeze = ["a"]')
    text = text.replace("seed = 3", "seed = 4")
    devices = Devices(tmp_path, text)
    one = polyfed.run(devices.recipe, tmp_path / "one", engine="sequential").result
    shutil.rmtree(tmp_path / "first")
    got = devices.serve(tmp_path / "run")
    assert got["state_sha256"] == one["state_sha256"]


def _text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_server_cannot_make_a_device_read_a_file_of_its_own(source: Path, tmp_path: Path) -> None:
    with only(Allowance()), refuses(NotAllowed, "model.init: app carries"):
        given_of(warm(source / "tree.safetensors"), tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"init_blocks": ["a"]}, "model.init_blocks: set init"),
        ({"freeze": ["a"]}, "model.freeze: set init"),
        ({"init": "x", "init_blocks": ["a"], "freeze": ["b"]}, "model.freeze: init_blocks leaves"),
    ],
)
def test_options_without_an_effect_are_refused(model: dict[str, Any], words: str) -> None:
    with refuses(RecipeError, words):
        parse_recipe({"data": {"name": "cg-digits"}, "algorithm": {"name": "fedavg"}, "model": model})


def test_what_does_not_fit_is_named_with_both_shapes_and_with_what_does(source: Path, tmp_path: Path) -> None:
    def refused(words: str, init: Path, **model: Any) -> None:
        with refuses(RecipeError, words):
            assemble(warm(init, AWKWARD, **model))

    refused("model.init: does not exist", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    refused("model.init: neither a run", tmp_path / "empty")
    refused("model.init_blocks: no block 'c'", source / "run", init_blocks=("c",))
    refused("model.init: has the shape", source / "run", embedding=7)
    tree = dict(polyfed.load_run(source / "run").params)
    save_file(select(tree, ["a"]), tmp_path / "part.safetensors")
    refused("model.init: init_blocks = ['a']", tmp_path / "part.safetensors")
    save_file(tree | {"c.x": torch.zeros(2)}, tmp_path / "more.safetensors")
    refused("model.init: no 'c.x'", tmp_path / "more.safetensors")
    first = next(iter(tree))
    save_file({n: v for n, v in tree.items() if n != first}, tmp_path / "less.safetensors")
    refused(f"model.init: '{first}' is missing", tmp_path / "less.safetensors")
    polyfed.run(recipe(algorithm("local"), rounds=1), tmp_path / "local")
    refused("model.init: no global model", tmp_path / "local")
    save_file(tree | {first: tree[first] * float("nan")}, tmp_path / "nan.safetensors")
    with refuses(DataError, "model.init: NaN"):
        assemble(warm(tmp_path / "nan.safetensors", AWKWARD))
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    with refuses(DataError, "no safetensors file"):
        assemble(warm(tmp_path / "noise.safetensors", AWKWARD))


def test_a_device_takes_the_values_from_the_app(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from polyfed.deploy.device.tasks import packed, unpacked
    from polyfed.experiment.running.warm_start import APP_COPY, write_text_copy

    def unpack(text: str) -> Path:
        (tmp_path / "app").write_bytes(packed("seed = 1\n", text))
        return unpacked(tmp_path / "app", tmp_path / "texts").parent

    write_text_copy({"a.w": torch.ones(2)}, tmp_path)
    text = (tmp_path / APP_COPY).read_text()
    (tmp_path / "texts").mkdir()
    assert same(given_of(warm("x"), unpack(text)), {"a.w": torch.ones(2)})
    with only(Allowance()), refuses(DataError, "cannot be read"):
        given_of(warm("x"), unpack("{}"))
