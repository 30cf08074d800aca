"""Laws of the model: one function of a Tree, whichever way it is run."""

from threading import Thread

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.core.tree import block_of, digest
from polyfed.model import ModelSpec, build_model
from refusals import refuses

ENCODERS = {
    "mlp": ({"kind": "mlp", "hidden": [6]}, (5,)),
    "cnn4": ({"kind": "cnn4"}, (1, 8, 8)),
    "conv-gru": ({"kind": "conv-gru", "channels": [4, 6], "kernel": 3}, (8, 3)),
    "conv2d-gru": ({"kind": "conv2d-gru", "channels": [3, 2], "hidden": 5}, (9, 7)),
    "resnet18": ({"kind": "resnet18", "widths": [2, 4, 4, 8], "stem": "cifar"}, (2, 8, 8)),
    "resnet18-group": ({"kind": "resnet18", "widths": [2, 4, 4, 8], "norm": "group"}, (2, 16, 16)),
    "transformer": ({"kind": "transformer", "layers": 1, "heads": 2, "feedforward": 12}, (6, 3)),
    "custom": ({"kind": f"{__name__}:Own"}, (5,)),
}
PAIRS = [(e, f) for e in ENCODERS for f in ("concat", "sum", "gated")] + [("conv-gru", "attention")]


class Own(nn.Module):
    """A user's encoder: BatchNorm, a dropout used twice, a tied weight, a constant."""

    def __init__(self, shape, embedding):
        super().__init__()
        self.inp = nn.Linear(shape[0], 6)
        self.mid = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.mid.weight
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(6, embedding)
        self.register_buffer("gain", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        z = self.drop(self.norm(self.inp(x)).relu())
        return self.out(self.drop(self.tied(self.mid(z))) * self.gain)


def make(encoder="mlp", fusion="concat", head=(5,), dropout=0.2, classes=3, names=("a", "b")):
    entry, shape = ENCODERS[encoder]
    spec = ModelSpec(
        fusion=fusion, embedding=8, head=head, dropout=dropout, encoders=dict.fromkeys(names, entry),
        attention_hidden=6, attention_heads=2,
    )  # fmt: skip
    return build_model(spec, dict.fromkeys(names, shape), classes)


def sample(model, size=6, seed=0, dtype=torch.float32, **more):
    g = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(size, *model.shapes[name], generator=g, dtype=dtype) for name in model.modalities}
    y = torch.randint(model.num_classes, (size,), generator=g)
    return Batch(x=x, y=y, rows=torch.arange(size), **more)


def loss_of(model, w, batch):
    return batch.mean(nn.functional.cross_entropy(model.logits(w, batch), batch.y, reduction="none"))


def split(model, w):
    params = model.trainable(w)
    return params, {name: value for name, value in w.items() if name not in params}


def masked_batch(model, client):
    ok = torch.arange(6) < (6, 4, 5)[client]
    present = {"b": torch.tensor([True, False, True, True, True, False]).roll(client)}
    return sample(model, seed=client, dtype=torch.float64, ok=ok, present=present, key=torch.tensor(10 + client))


def in_a_loop(model, trees):
    """Gradients and buffers of plain autograd, client by client."""
    gradients = []
    for client, w in enumerate(trees):
        params = {name: value.clone().requires_grad_() for name, value in model.trainable(w).items()}
        value = loss_of(model, {**w, **params}, masked_batch(model, client))
        gradients.append(dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True)))
    return gradients


@pytest.mark.parametrize(("encoder", "fusion"), PAIRS)
def test_vmap_of_grad_is_the_loop(encoder, fusion):
    model = make(encoder, fusion)
    # float64: in float32 the ReLU kinks of a tiny net turn rounding into visible differences
    trees = [{name: value.double() for name, value in model.init(key).items()} for key in range(3)]
    stacked = {name: torch.stack([w[name] for w in trees]) for name in trees[0]}
    batches = [masked_batch(model, client) for client in range(3)]
    x = {name: torch.stack([b.x[name] for b in batches]) for name in model.modalities}
    y, ok, key = (torch.stack([getattr(b, field) for b in batches]) for field in ("y", "ok", "key"))
    present = torch.stack([b.present["b"] for b in batches])

    def loss(params, buffers, x, y, ok, present, key):
        batch = Batch(x=x, y=y, rows=torch.arange(6), ok=ok, present={"b": present}, key=key)
        return loss_of(model, {**params, **buffers}, batch)

    params, buffers = split(model, stacked)
    together = vmap(grad(loss))(params, buffers, x, y, ok, present, key)
    alone = in_a_loop(model, trees)
    for client in range(3):
        for name, value in together.items():
            torch.testing.assert_close(value[client], alone[client][name], rtol=1e-8, atol=1e-11)
        for name, value in buffers.items():
            torch.testing.assert_close(value[client], trees[client][name], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(("encoder", "fusion"), PAIRS)
def test_live_path_is_the_functional_path(encoder, fusion):
    model = make(encoder, fusion)
    w = model.init(1)
    batch = sample(model, key=3)
    functional = {name: value.clone() for name, value in w.items()}
    params = {name: value.clone().requires_grad_() for name, value in model.trainable(w).items()}
    expected = loss_of(model, {**functional, **params}, batch)
    expected_grads = torch.autograd.grad(expected, list(params.values()))
    with model.live(w) as lent:
        assert set(lent) == set(w)
        actual = loss_of(model, lent, batch)
        grads = torch.autograd.grad(actual, [lent[name] for name in params])
        # on the live path, cnn4 has another memory format, and sums are rounded in another order
        close = {"rtol": 1e-5, "atol": 1e-7} if encoder == "cnn4" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(actual, expected, **close)
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b, **close)
        for name in functional:
            if model.is_buffer(name):
                assert torch.equal(lent[name], functional[name])


def test_other_trees_still_work_while_one_is_lent_out():
    model = make("cnn4")
    w, other, batch = model.init(1), model.init(2), sample(make("cnn4"))
    expected = model.logits(other, batch)
    with model.live(w) as lent:
        assert torch.equal(model.logits(other, batch), expected)
        assert torch.equal(model.logits(lent, batch), model.logits(w, batch))
        with torch.no_grad():
            lent["shared.bias"].add_(1.0)
        assert not torch.equal(model.logits(lent, batch), model.logits(w, batch))
        with model.live(other) as second:  # copies, because the model's own tensors are lent already
            assert torch.equal(model.logits(second, batch), expected)
            with torch.no_grad():
                second["shared.bias"].add_(2.0)
            assert torch.equal(model.logits(other, batch), expected)
        assert torch.equal(lent["shared.bias"], w["shared.bias"] + 1.0)
        assert all(value.requires_grad for name, value in lent.items() if not model.is_buffer(name))
    assert torch.equal(model.logits(other, batch), expected)


def test_threads_make_the_same_modules_as_one_thread() -> None:
    encoders = {"x": {"kind": "mlp", "hidden": [400, 400]}}
    model = build_model(ModelSpec(embedding=4, encoders=encoders), {"x": (16,)}, 3)
    expected, found = digest(model.init(5)), list[str]()

    def work() -> None:
        found.extend(digest(model.init(5)) for _ in range(20))

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80


def test_evaluation_leaves_the_tree_alone_and_training_updates_only_statistics():
    model = make("cnn4")
    w = model.init(1)
    before = {name: value.clone() for name, value in w.items()}
    model.logits(w, sample(model))
    assert all(torch.equal(w[name], before[name]) for name in w)
    model.logits(w, sample(model, key=1))
    changed = {name for name in w if not torch.equal(w[name], before[name])}
    assert changed == {name for name in w if model.is_buffer(name)}


def test_blocks_are_initialised_independently_of_each_other():
    two, three = make(names=("a", "b")), make(names=("a", "c", "b"))
    assert set(two.init(1)) < set(three.init(1))
    for name, value in two.init(1).items():
        assert torch.equal(value, three.init(1)[name])
    assert not torch.equal(two.init(1)["a.encoder.0.weight"], two.init(1)["b.encoder.0.weight"])
    assert not torch.equal(two.init(1)["a.encoder.0.weight"], two.init(2)["a.encoder.0.weight"])


def test_global_generator_is_never_consumed():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    model = make("conv-gru")
    loss_of(model, model.init(1), sample(model, key=2))
    torch.testing.assert_close(torch.rand(3), expected)


def test_layers_forget_the_batch_after_an_error():
    model = make("cnn4")
    w, batch = model.init(1), sample(model, key=1)
    broken = Batch(x={"a": torch.zeros(6, 2, 8, 8)}, y=batch.y, rows=batch.rows, key=1)
    with pytest.raises(RuntimeError):
        model.features(w, broken)
    assert model._rows.key is None
    with model.live(w) as lent:
        assert torch.equal(model.logits(lent, batch.evaluation()), model.logits(w, batch.evaluation()))


def test_names_follow_the_blocks_a_client_owns():
    model = make()
    assert {block_of(name) for name in model.names(["b"])} == {"b", "shared"}
    assert model.names(["a", "b"]) == tuple(model.init(0)) == tuple(model.template)
    assert model.head_slice("a") == ("a.fusion.weight",)
    assert make(fusion="sum").head_slice("a") == ()
    assert model.num_parameters(["a"]) < model.num_parameters() == sum(v.numel() for v in model.init(0).values())
    for name, value in model.init(0).items():
        assert model.template[name].shape == value.shape


def test_client_with_one_modality_runs_on_its_own_blocks():
    model = make("cnn4")
    w = model.init(1)
    whole = sample(model)
    own = Batch(x={"b": whole.x["b"]}, y=whole.y, rows=whole.rows)
    mine = {name: w[name] for name in model.names(["b"])}
    assert torch.equal(model.logits(mine, own), model.logits(w, own))
    with model.live(mine) as lent:
        assert torch.equal(model.logits(lent, own), model.logits(w, own))
    with refuses(AssertionError, "lacks the block"):
        model.logits(mine, whole)


def test_custom_encoder_keeps_ties_and_constants():
    model = make("custom")
    w = model.init(1)
    assert "a.encoder.mid.weight" in w
    assert "a.encoder.tied.weight" not in w
    assert "a.encoder.gain" not in w
    own = Own((5,), 8).eval()
    own.load_state_dict(
        {name.removeprefix("a.encoder."): value for name, value in w.items() if name.startswith("a.encoder.")},
        strict=False,
    )
    batch = sample(model)
    torch.testing.assert_close(model.features(w, batch)["a"], own(batch.x["a"]))


def test_flops_count_two_per_multiply_add():
    model = make(fusion="concat", head=())
    assert model.flops("a") == 2 * (5 * 6 + 6 * 8 + 8 * 3)
    assert model.flops("shared") == 0
    model = make(fusion="sum", head=(5,))
    assert model.flops("shared") == 2 * (8 * 5 + 5 * 3)


@pytest.mark.parametrize("name", ["shared", "labels", "two words", "1st", "a.b", ""])
def test_bad_modality_names_are_refused(name):
    with refuses(ModelError, "letters"):
        build_model(ModelSpec(encoders={name: {"kind": "mlp"}}), {name: (3,)}, 2)


@pytest.mark.parametrize("name", ["type", "forward", "half", "training", "encoder", "items"])
def test_names_of_module_attributes_are_fine_for_modalities(name):
    model = build_model(ModelSpec(encoders={name: {"kind": "mlp"}}), {name: (3,)}, 2)
    assert f"{name}.encoder.0.weight" in model.init(0)


def test_encoders_and_modalities_must_match():
    with refuses(ModelError, "model.encoders.b: no entry"):
        build_model(ModelSpec(encoders={"a": {"kind": "mlp"}}), {"a": (3,), "b": (3,)}, 2)
    with refuses(ModelError, "model.encoders.audo: mean 'audio'"):
        build_model(ModelSpec(encoders={"audio": {"kind": "mlp"}, "audo": {"kind": "mlp"}}), {"audio": (3,)}, 2)


def test_an_algorithms_own_names_travel_with_the_tree():
    model = make()
    w, batch = {**model.init(1), "shared.projection.weight": torch.ones(2)}, sample(make())
    expected = model.logits(w, batch)
    with model.live(w) as lent:
        assert torch.equal(model.logits(lent, batch), expected)
        lent["shared.projection.weight"].sum().backward()
        assert lent["shared.projection.weight"].grad is not None
    assert w["shared.projection.weight"].grad is None


def test_facts_of_the_features_are_told():
    assert make(head=()).linear_head
    assert not make(head=(5,)).linear_head
    assert make("conv-gru", "attention").feature_size("a") == 8
