"""Laws of the fusions; the oracles are single layers of PyTorch over the concatenation, and NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.model import FUSIONS, ModelSpec, build_model
from refusals import refuses


def make(fusion, head=(), names=("a", "b", "c")):
    series = {"kind": "conv-gru", "channels": [4], "kernel": 3}
    entry, shape = (series, (8, 3)) if fusion == "attention" else ({"kind": "mlp"}, (5,))
    spec = ModelSpec(
        fusion=fusion, embedding=8, head=head, attention_hidden=6, attention_heads=2,
        encoders=dict.fromkeys(names, entry),
    )  # fmt: skip
    return build_model(spec, dict.fromkeys(names, shape), 3)


def sample(model, size=6, **more):
    g = torch.Generator().manual_seed(0)
    x = {name: torch.randn(size, *model.shapes[name], generator=g) for name in model.modalities}
    return Batch(x=x, y=torch.zeros(size, dtype=torch.int64), rows=torch.arange(size), **more)


def only(batch, *names):
    return Batch(x={name: batch.x[name] for name in names}, y=batch.y, rows=batch.rows)


@pytest.mark.parametrize("head", [(), (7,), (7, 4)])
def test_concat_is_one_network_over_the_concatenated_features(head):
    model = make("concat", head)
    w, batch = model.init(1), sample(model)
    z = torch.cat(list(model.features(w, batch).values()), 1)
    out = z @ torch.cat([w[f"{m}.fusion.weight"] for m in model.modalities], 1).T + w["shared.bias"]
    rest = [value for name, value in w.items() if name.startswith("shared.head")]
    for weight, bias in zip(rest[::2], rest[1::2], strict=True):
        out = out.relu() @ weight.T + bias
    assert len(rest) == 2 * len(head)
    torch.testing.assert_close(model.logits(w, batch), out)


def test_sum_is_a_linear_layer_on_the_sum():
    model = make("sum")
    w, batch = model.init(1), sample(model)
    total = torch.stack(list(model.features(w, batch).values())).sum(0)
    expected = nn.functional.linear(total, w["shared.head.0.weight"], w["shared.head.0.bias"])
    torch.testing.assert_close(model.logits(w, batch), expected)


def gated_by_hand(w, z, names):
    h = {m: (z[m] @ w[f"{m}.fusion.weight"].T + w[f"{m}.fusion.bias"]).detach().numpy() for m in names}
    values = [h[m] for m in names if m != "a"]
    lone = h["a"] if "a" in h else sum(values)
    fused = sum(values) / (1 + np.exp(-h["a"])) if "a" in h and values else lone
    return fused @ w["shared.head.0.weight"].numpy().T + w["shared.head.0.bias"].numpy()


@pytest.mark.parametrize("names", ["abc", "ab", "bc", "a", "b"])
def test_gate_of_the_first_modality_opens_the_sum_of_the_others(names):
    model = make("gated")
    w, batch = model.init(1), sample(model)
    z = model.features(w, batch)
    np.testing.assert_allclose(
        model.logits(w, only(batch, *names)).detach(), gated_by_hand(w, z, names), rtol=1e-4, atol=1e-6
    )


def test_attention_is_the_formula_written_out():
    model = make("attention", head=(5,))
    w, batch = model.init(1), sample(model)
    v = {name: value.double().numpy() for name, value in w.items()}
    steps = torch.cat(list(model.features(w, batch).values()), 1).detach().double().numpy()
    hidden = np.tanh(steps @ v["shared.score.0.weight"].T + v["shared.score.0.bias"])
    scores = hidden @ v["shared.score.2.weight"].T + v["shared.score.2.bias"]
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    pooled = np.einsum("bth,bte->bhe", weights, steps).reshape(len(steps), -1)
    hidden = np.maximum(pooled @ v["shared.head.0.weight"].T + v["shared.head.0.bias"], 0)
    expected = hidden @ v["shared.head.2.weight"].T + v["shared.head.2.bias"]
    np.testing.assert_allclose(model.logits(w, batch).detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_absent_modality_contributes_exactly_nothing(fusion):
    model = make(fusion, head=(7,))
    w, batch = model.init(1), sample(model)
    nobody = dict.fromkeys("b", torch.zeros(6, dtype=torch.bool))
    masked = Batch(x=batch.x, y=batch.y, rows=batch.rows, present=nobody)
    torch.testing.assert_close(model.logits(w, masked), model.logits(w, only(batch, "a", "c")), rtol=1e-6, atol=1e-6)
    wild = Batch(x={**batch.x, "b": batch.x["b"] * 100}, y=batch.y, rows=batch.rows, present=nobody)
    assert torch.equal(model.logits(w, wild), model.logits(w, masked))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_row_is_fused_from_what_it_has(fusion):
    model = make(fusion, head=(7,))
    w, batch = model.init(1), sample(model)
    present = {
        "a": torch.tensor([True, True, False, True, False, True]),
        "b": torch.tensor([True, False, True, False, False, True]),
        "c": torch.tensor([True, False, False, True, True, False]),
    }
    together = model.logits(w, Batch(x=batch.x, y=batch.y, rows=batch.rows, present=present))
    for row in range(6):
        own = [name for name in "abc" if present[name][row]]
        alone = model.logits(w, only(batch, *own))[row]
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fusion", ["concat", "sum"])
def test_head_slices_sum_to_the_logits(fusion):
    model = make(fusion)
    w = model.init(1)
    batch = sample(model, present={"b": torch.arange(6) > 2})
    z = model.features(w, batch)
    terms = [model.unimodal_logits(w, z, name, batch) for name in model.modalities]
    torch.testing.assert_close(torch.stack(terms).sum(0), model.logits(w, batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_zero_mode_is_what_a_client_with_one_modality_sees(fusion):
    model = make(fusion, head=(7,))
    w, batch = model.init(1), sample(model)
    lone = model.unimodal_logits(w, model.features(w, batch), "b", batch, mode="zero")
    assert torch.equal(lone, model.logits(w, only(batch, "b")))


@pytest.mark.parametrize(("fusion", "head"), [("concat", (7,)), ("sum", (7,)), ("gated", ()), ("attention", ())])
def test_head_mode_is_refused_where_the_logits_do_not_split(fusion, head):
    model = make(fusion, head)
    w, batch = model.init(1), sample(model)
    with refuses(ModelError, "Uni-modal"):
        model.unimodal_logits(w, model.features(w, batch), "a", batch)


def test_attention_features_are_sequences_and_vector_averages_them():
    model = make("attention")
    w, batch = model.init(1), sample(model)
    z = model.features(w, batch)
    assert z["a"].shape == (6, 4, 8)
    torch.testing.assert_close(model.vector(z["a"]), z["a"].mean(1))
    torch.testing.assert_close(model.vectors(w, batch), {m: value.mean(1) for m, value in z.items()})


def test_attention_refuses_an_encoder_without_a_sequence():
    with refuses(ModelError, "attention fusion"):
        build_model(ModelSpec(fusion="attention", encoders={"a": {"kind": "mlp"}}), {"a": (3,)}, 2)


def test_spec_refuses_values_without_meaning():
    for wrong, text in (
        ({"fusion": "concatenate"}, "model.fusion: mean 'concat'"),
        ({"embedding": 0}, "model.embedding: embedding = 0"),
        ({"head": 64}, "model.head: a list"),
        ({"dropout": 1.0}, "model.dropout: a probability"),
    ):
        with refuses(ModelError, text):
            ModelSpec(**wrong)
