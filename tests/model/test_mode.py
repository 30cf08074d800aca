"""The mode of the user's own modules, and the random numbers that they draw."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import polyfed
from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.model import Model, ModelSpec, build_model
from refusals import refuses

SHAPE = (6,)


class Reads(nn.Module):
    """Reads its mode, at two depths, and keeps one part in evaluation mode."""

    seen: ClassVar[list[tuple[bool, bool, bool]]] = []

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(shape[0], embedding), nn.ReLU())
        self.still = nn.Linear(embedding, embedding)
        self.norm = nn.BatchNorm1d(embedding)

    def train(self, mode: bool = True) -> "Reads":
        super().train(mode)
        self.still.train(False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        Reads.seen.append((self.training, self.inner[1].training, self.still.training))
        out: Tensor = self.still(self.norm(self.inner(x))) * (100.0 if self.training else 1.0)
        return out


class Draws(nn.Module):
    """Draws random numbers in one of the ways that users know."""

    def __init__(self, shape: tuple[int, ...], embedding: int, way: str) -> None:
        super().__init__()
        self.first, self.way = nn.Linear(shape[0], embedding), way
        self.plain = [nn.Dropout(0.5)]  # a list, so that the layer is no submodule

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.first(x)
        if self.way == "dropout":
            return functional.dropout(z, 0.5, self.training)
        if self.way == "path":
            return z * torch.bernoulli(z.new_full((len(z), 1), 0.5)) if self.training else z
        if self.way == "attention":
            q = z[:, None, :, None]
            p = 0.5 if self.training else 0.0
            return functional.scaled_dot_product_attention(q, q, q, dropout_p=p)[:, 0, :, 0]
        if self.way == "list":
            return self.plain[0](z)  # type: ignore[no-any-return]
        assert self.way == "always"
        return z + torch.randn_like(z)


class Chooses(nn.Module):
    """A whole module that drops its input with functional dropout."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], num_outputs: int) -> None:
        super().__init__()
        self.top = nn.Linear(shapes["a"][0], num_outputs)

    def forward(self, x: dict[str, Tensor], present: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.top(functional.dropout(x["a"] * present["a"].unsqueeze(1), 0.5, self.training))
        return out


def built(kind: str, **options: Any) -> Model:
    spec = ModelSpec(embedding=4, encoders={"a": {"kind": f"test_mode:{kind}", **options}})
    return build_model(spec, {"a": SHAPE}, 3)


def batch(key: int | None = None) -> Batch:
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    return Batch(x={"a": x}, y=torch.zeros(5, dtype=torch.int64), rows=torch.arange(5), key=key)


def test_modules_know_the_mode_of_each_call() -> None:
    model = built("Reads")
    w = model.init(0)
    Reads.seen.clear()
    model.logits(w, batch(1))
    model.logits(w, batch())
    model.logits(w, batch())
    model.logits(w, batch(2))
    assert Reads.seen == [(True, True, False), (False, False, False), (False, False, False), (True, True, False)]
    net = Reads(SHAPE, 4).eval()
    net.load_state_dict({n.removeprefix("a.encoder."): v for n, v in w.items() if ".encoder." in n}, strict=False)
    torch.testing.assert_close(model.features(w, batch())["a"], net(batch().x["a"]))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_run_trains_and_evaluates_in_its_mode_and_so_do_the_module_and_the_onnx_file(
    engine: str, tmp_path: Path
) -> None:
    x = torch.randn(60, *SHAPE, generator=torch.Generator().manual_seed(0))
    run = polyfed.run(
        data={"a": x}, labels=torch.arange(60) % 3, clients=2, rounds=1, engine=engine,
        model={"embedding": 4, "encoders": {"a": {"kind": "test_mode:Reads"}}},
    )  # fmt: skip
    Reads.seen.clear()
    expected = run.predict({"a": x[:4]})
    folder = run.export(tmp_path / "model", onnx=_has_onnx())
    net = polyfed.load_model(folder, imports=["test_mode:Reads"]).module().train()
    assert not net.training, "it computes as `predict`"
    torch.testing.assert_close(net({"a": x[:4]}), expected)
    torch.testing.assert_close(torch.export.export(net, ({"a": x[:4]},)).module()({"a": x[:4]}), expected)
    if _has_onnx():
        from onnx.reference import ReferenceEvaluator

        (found,) = ReferenceEvaluator(str(folder / "global.onnx")).run(None, {"a": x[:4].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-4)


def _has_onnx() -> bool:
    import importlib.util

    return importlib.util.find_spec("onnx") is not None


@pytest.mark.parametrize("way", ["dropout", "path", "attention", "list", "always"])
def test_random_numbers_of_pytorch_are_refused_with_a_cure(way: str) -> None:
    state = torch.get_rng_state()
    with refuses(ModelError, "scaled_dot_product_attention"):
        built("Draws", way=way)
    assert torch.equal(state, torch.get_rng_state())


def test_a_whole_module_that_draws_is_refused() -> None:
    with refuses(ModelError, "draws random"):
        build_model(ModelSpec(module="test_mode:Chooses", blocks={"a": ()}), {"a": SHAPE}, 3)


class Fails(nn.Module):
    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.top = nn.Linear(shape[0], embedding)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise ValueError("only for evaluation")
        out: Tensor = self.top(x)
        return out


def test_a_fault_of_the_training_mode_is_found_before_the_run() -> None:
    with refuses(ModelError, "training mode"):
        built("Fails")


class Padded(nn.Module):
    """PyTorch's encoder with a mask: in evaluation mode, PyTorch would choose kernels that `vmap` does not support."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.wide = nn.Linear(1, embedding)
        layer = nn.TransformerEncoderLayer(embedding, 2, 8, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.arange(x.shape[1], device=x.device).expand(x.shape) >= x.shape[1] - 2
        return self.body(self.wide(x.unsqueeze(-1)), src_key_padding_mask=hidden)[:, 0]  # type: ignore[no-any-return]


def test_pytorchs_transformer_evaluates_stacked_as_alone() -> None:
    model = built("Padded")
    trees = [model.init(seed) for seed in (1, 2)]
    stacked = {n: torch.stack([w[n] for w in trees]) for n in trees[0]}
    rows = batch()
    with torch.no_grad():
        many = torch.func.vmap(lambda w: model.logits(w, rows))(stacked)
        for w, found in zip(trees, many, strict=True):
            torch.testing.assert_close(found, model.logits(w, rows))


class Rows(nn.Module):
    """Applies a layer to (B * T, C), with the rows first or not, or to a tensor that does not depend on the rows."""

    def __init__(self, shape: tuple[int, ...], embedding: int, layer: str, form: str) -> None:
        super().__init__()
        self.wide, self.top = nn.Linear(1, 8), nn.Linear(8, embedding)
        self.layer = nn.BatchNorm1d(8) if layer == "norm" else nn.Dropout(0.5)
        self.register_buffer("offset", torch.ones(shape[0], 8), persistent=False)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        z = self.wide(x.unsqueeze(-1))
        if self.form == "rows":
            z = self.layer(z.flatten(0, 1)).unflatten(0, z.shape[:2])
        elif self.form == "time":
            z = self.layer(z.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], len(x))).transpose(0, 1)
        elif self.form == "mixed":
            z = self.layer((z - z.mean(0)).flatten(0, 1)).unflatten(0, z.shape[:2])
        else:
            z = z + self.layer(self.offset)
        out: Tensor = self.top(z.mean(1))
        return out


@pytest.mark.parametrize("layer", ["norm", "dropout"])
def test_batchnorm_and_dropout_need_the_rows_on_the_first_axis(layer: str) -> None:
    built("Rows", layer=layer, form="rows")
    built("Rows", layer=layer, form="none")
    for form in ("time", "mixed"):
        with refuses(ModelError, "rows mixes"):
            built("Rows", layer=layer, form=form)
