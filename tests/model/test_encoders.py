"""Laws of the encoders: sizes of the sources, layouts, messages; and what `adopt` swaps and refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.core.batch import Batch
from polyfed.core.errors import ModelError
from polyfed.model import Cnn4, ConvGru, Custom, Mlp, ModelSpec, ResNet18, Transformer, build_model, encoder_spec
from polyfed.model.encoders.images import NormalisedInput
from polyfed.model.encoders.spectrograms import Conv2dGru
from polyfed.model.modules.layer_replacement import adopt
from polyfed.model.modules.layers import BatchNorm, Dropout, Rows
from refusals import refuses


def count(module):
    return sum(p.numel() for p in module.parameters())


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_ucihar_model_has_the_published_size():
    spec = ModelSpec(
        fusion="attention", embedding=128, head=(64,), dropout=0.1,
        encoders={"acc": {"kind": "conv-gru"}, "gyro": {"kind": "conv-gru"}},
    )  # fmt: skip
    model = build_model(spec, {"acc": (128, 3), "gyro": (128, 3)}, 6)
    assert model.num_parameters() == 420_684
    assert model.num_parameters(["acc"]) == 420_684 - 150_976
    batch = Batch(x={"acc": normal(2, 128, 3)}, y=torch.zeros(2, dtype=torch.int64), rows=torch.arange(2))
    assert model.features(model.init(0), batch)["acc"].shape == (2, 16, 128)


def test_resnet18_has_the_published_size():
    for channels, size in ((3, 11_176_512), (1, 11_170_240)):
        assert count(ResNet18().build((channels, 32, 32), 512)) == size


def test_resnet18_cut_gives_64_features_without_a_projection():
    net = ResNet18(stem="cifar", widths=(16, 32, 64, 64)).build((3, 32, 32), 64)
    assert net.project is None
    assert net.layers(torch.zeros(2, 3, 32, 32)).shape == (2, 64, 4, 4)
    assert ResNet18(widths=(2, 2, 2, 2)).build((3, 32, 32), 7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_group_norm_keeps_the_size_and_leaves_no_statistics():
    net = ResNet18(norm="group").build((3, 32, 32), 512)
    assert count(net) == 11_176_512
    assert not list(net.buffers())


def test_clips_are_the_mean_over_their_frames():
    net = ResNet18(widths=(2, 4, 4, 8)).build((3, 5, 16, 16), 8).eval()
    clip = normal(2, 3, 5, 16, 16)
    frames = ResNet18(widths=(2, 4, 4, 8)).build((3, 16, 16), 8).eval()
    frames.load_state_dict(net.state_dict())
    expected = torch.stack([frames(clip[:, :, t]) for t in range(5)]).mean(0)
    torch.testing.assert_close(net(clip), expected, rtol=1e-4, atol=1e-6)


def test_cnn4_has_the_layers_of_its_source():
    net = Cnn4().build((3, 28, 28), 512)
    convolutions = (75 * 32 + 32) + (288 * 32 + 32) + (288 * 64 + 64) + (576 * 64 + 64)
    assert count(net) == 2 * 3 + convolutions + 64 * 512 + 512
    assert net.layers(torch.zeros(2, 3, 28, 28)).shape == (2, 64, 7, 7)
    assert (net.project.bias == 0).all()
    deviation = (2 / (32 * 25)) ** 0.5  # Kaiming, fan out
    np.testing.assert_allclose(net.layers[1].weight.std().item(), deviation, rtol=0.1)
    deviation = (2 / (64 + 512)) ** 0.5  # Xavier
    np.testing.assert_allclose(net.project.weight.std().item(), deviation, rtol=0.1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_cnn4_computes_its_first_layers_in_another_order_with_equal_results(channels, masked):
    """The oracle is the plain chain of the same layers, with a masked batch normalisation for padded rows."""
    net = Cnn4().build((channels, 12, 10), 8)
    rows = Rows()
    rows.bound = masked  # with and without the memory format that `vmap` does not support
    layers = adopt(net.layers, rows, "x")
    norm = layers[0]
    norm.weight.data, norm.bias.data = normal(channels) + 1, normal(channels)  # not the initial 1 and 0
    x = normal(5, channels, 12, 10).requires_grad_()
    batch = Batch(x={}, y=torch.zeros(5, dtype=torch.int64), rows=torch.arange(5), key=1)
    if masked:
        batch = replace(batch, ok=torch.tensor([True, True, True, False, True]))
    results = []
    for forward in (NormalisedInput.forward, nn.Sequential.forward):
        norm.running_mean.zero_(), norm.running_var.fill_(1)
        rows.see(batch)
        out = forward(layers, x)
        rows.clear()
        grads = torch.autograd.grad(out.square().sum(), [x, *layers.parameters()])
        results.append([out, norm.running_mean.clone(), norm.running_var.clone(), *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


@pytest.mark.parametrize("channels", [1, 3])
def test_activations_and_gradients_of_cnn4_have_one_memory_format_in_training(channels):
    """Operations on two tensors with different formats take several times as long."""
    net = Cnn4().build((channels, 12, 10), 8)
    rows = Rows()
    rows.bound = False
    net.layers = adopt(net.layers, rows, "x")
    found = []

    def see(layer, given, out):
        found.append(out)
        out.register_hook(found.append)

    for layer in net.layers:
        if isinstance(layer, (nn.ReLU, nn.MaxPool2d)):
            layer.register_forward_hook(see)
    rows.see(Batch(x={}, y=torch.zeros(5, dtype=torch.int64), rows=torch.arange(5), key=1))
    net(normal(5, channels, 12, 10)).square().sum().backward()
    assert len(found) == 2 * 5
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in found)


class ImageGradients(TorchDispatchMode):
    """The number of images, each time that a convolution computes the gradient of its RGB input."""

    def __init__(self):
        super().__init__()
        self.images = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution_backward.default and args[1].shape[1] == 3 and found[0] is not None:
            self.images.append(len(found[0]))
        return found


@pytest.mark.parametrize(("forward", "images"), [(NormalisedInput.forward, [1]), (nn.Sequential.forward, [5])])
def test_a_training_step_of_cnn4_needs_no_gradient_of_its_normalised_input(forward, images):
    rows = Rows()
    layers = adopt(Cnn4().build((3, 12, 10), 8).layers, rows, "x")
    rows.see(Batch(x={}, y=torch.zeros(5, dtype=torch.int64), rows=torch.arange(5), key=1))
    out = forward(layers, normal(5, 3, 12, 10))
    with ImageGradients() as gradients:
        out.sum().backward()
    assert gradients.images == images, "only the gradient of one image of constants"


def test_image_layouts_are_the_same_picture():
    first = Cnn4().build((3, 12, 10), 8).eval()
    last = Cnn4().build((12, 10, 3), 8).eval()
    last.load_state_dict(first.state_dict())
    x = normal(2, 3, 12, 10)
    torch.testing.assert_close(last(x.permute(0, 2, 3, 1)), first(x))
    assert Cnn4().build((12, 10), 8)(torch.zeros(2, 12, 10)).shape == (2, 8)


def test_mlp_without_hidden_layers_is_linear():
    net = Mlp().build((2, 3), 4)
    x = normal(5, 2, 3)
    torch.testing.assert_close(net(x), nn.functional.linear(x.flatten(1), net[0].weight, net[0].bias))


def test_conv_gru_averages_its_states_or_gives_them():
    spec = ConvGru(channels=(4, 6), kernel=3, dropout=0.0)
    mean, states = spec.build((9, 3), 5), spec.build((9, 3), 5, sequence=True)
    states.load_state_dict(mean.state_dict())
    x = normal(2, 9, 3)
    assert states(x).shape == (2, 2, 5)
    torch.testing.assert_close(mean(x), states(x).mean(1))


def test_conv2d_gru_sees_time_and_frequency_and_ignores_padded_steps():
    spec = Conv2dGru(channels=(4, 6), kernel=1, hidden=7, layers=2)
    net = spec.build((16, 5), 3)
    x = normal(2, 16, 5)
    assert net.project.weight.shape == (7, 6 * 2)  # five bands, halved twice and rounded up
    assert net(x).shape == (2, 3)
    x[:, 8:] = 0.0
    torch.testing.assert_close(net(x), net(x[:, :8]), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(net(x), net(x.roll(1, 2)), atol=1e-4), "the bands have an order"
    assert net(torch.zeros(2, 16, 5)).isfinite().all()
    states = spec.build((16, 5), 3, sequence=True)
    states.load_state_dict(net.state_dict())
    torch.testing.assert_close(states(x)[:, :2].mean(1), net(x))


def test_transformer_ignores_padded_steps():
    net = Transformer(layers=2, heads=2, feedforward=8).build((6, 3), 4)
    x = normal(2, 4, 3)
    padded = torch.cat([x, torch.zeros(2, 2, 3)], 1)
    torch.testing.assert_close(net(padded), net(x), rtol=1e-4, atol=1e-6)
    assert net(torch.zeros(2, 6, 3)).isfinite().all()


@pytest.mark.parametrize(
    ("entry", "shape", "text"),
    [
        ({"kind": "mpl"}, (3,), "model.encoders.audio: mean 'mlp'"),
        ({"hidden": [3]}, (3,), "model.encoders.audio: table"),
        ({"kind": "mlp", "hiden": [3]}, (3,), "model.encoders.audio: mean 'hidden'"),
        ({"kind": "mlp", "hidden": [0]}, (3,), "model.encoders.audio: at least 1"),
        ({"kind": "conv-gru"}, (4, 3), "halve"),
        ({"kind": "conv-gru", "kernel": 4}, (64, 3), "model.encoders.audio: odd"),
        ({"kind": "conv-gru"}, (4,), "time series"),
        ({"kind": "conv2d-gru"}, (4,), "spectrograms"),
        ({"kind": "conv2d-gru", "kernel": 2}, (64, 3), "model.encoders.audio: odd"),
        ({"kind": "conv2d-gru", "layers": 0}, (64, 3), "model.encoders.audio: at least 1"),
        ({"kind": "cnn4"}, (4,), "it reads images"),
        ({"kind": "transformer", "heads": 5}, (4, 3), "does not divide"),
        ({"kind": "resnet18", "widths": [1, 2]}, (3, 8, 8), "model.encoders.audio: give four"),
        ({"kind": "resnet18", "stem": "cifr"}, (3, 8, 8), "model.encoders.audio: mean 'cifar'"),
        ({"kind": "nowhere.at.all:Net"}, (3,), "cannot be imported"),
        ({"kind": f"{__name__}:Nothing"}, (3,), "cannot be imported"),
        ({"kind": f"{__name__}:Wide"}, (3,), "gives (2, 65)"),
        ({"kind": f"{__name__}:Wide", "colour": 1}, (3,), "unexpected keyword"),
        ({"kind": f"{__name__}:count"}, (3,), "torch.nn.Module"),
    ],
)
def test_faults_of_an_entry_are_named_with_the_modality(entry, shape, text):
    with refuses(ModelError, text) as caught:
        build_model(ModelSpec(encoders={"audio": entry}), {"audio": shape}, 2)
    assert "audio" in str(caught.value)


class Wide(nn.Linear):
    def __init__(self, shape, embedding, more=1):
        super().__init__(shape[0], embedding + more)


def test_options_of_a_custom_encoder_reach_its_class():
    spec = encoder_spec("audio", {"kind": f"{__name__}:Wide", "more": 0})
    assert isinstance(spec, Custom)
    assert spec.build((3,), 8).out_features == 8


def test_adopt_reaches_into_torchs_transformer_layer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    with refuses(ModelError, "attention dropout"):
        adopt(layer, Rows(), "a")
    layer.self_attn.dropout = 0.0
    adopt(layer, Rows(), "a")
    found = [module for module in layer.modules() if isinstance(module, Dropout)]
    assert len(found) == len({module.stream for module in found}) == 3
    x = normal(2, 5, 8)
    reference = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), reference(x))


def test_adopt_keeps_values():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=1e-3, momentum=0.3))
    values = {name: value.clone() for name, value in net.named_parameters()}
    adopt(net, Rows(), "a")
    assert isinstance(net[1], BatchNorm)
    assert (net[1].eps, net[1].momentum) == (1e-3, 0.3)
    assert {name for name, _ in net.named_parameters()} == set(values)
    assert {name for name, _ in net.named_buffers()} == {"1.running_mean", "1.running_var"}


class Twice(nn.Module):
    """Uses one layer of each kind under two names, at different depths."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.layers = nn.Sequential(self.drop, nn.Linear(4, 4), self.norm, self.drop)


def test_a_layer_with_several_names_is_replaced_under_all_of_them():
    rows = Rows()
    net = adopt(Twice(), rows, "a")
    assert isinstance(net.drop, Dropout)
    assert isinstance(net.norm, BatchNorm)
    assert net.layers[0] is net.layers[3] is net.drop
    assert net.layers[2] is net.norm
    x = torch.ones(2, 50)
    rows.see(Batch(x={}, y=torch.zeros(2), rows=torch.arange(2), key=1))
    assert not torch.equal(net.layers[0](x), net.layers[3](x)), "one stream, another mask for each use"
    rows.clear()


class Scaled(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0] * 2


class MyNorm(nn.BatchNorm2d):
    pass


class MyDropout(nn.Dropout):
    pass


class MyAttention(nn.MultiheadAttention):
    pass


def hooked(layer, register="register_forward_hook"):
    getattr(layer, register)(lambda *_: None)
    return layer


def with_forward(layer):
    layer.forward = lambda x: x
    return layer


def complex_parameter(layer):
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    return layer


def test_hooks_that_the_replacement_keeps_are_allowed():
    calls = []
    for layer, x in ((nn.MaxPool2d(2), (normal(1, 1, 4, 4),)), (nn.Linear(2, 2), (normal(1, 2),))):
        layer.register_forward_hook(lambda *_: calls.append(1))
        adopt(nn.Sequential(layer), Rows(), "a")[0](*x)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "layer",
    [
        Scaled(3, 3, batch_first=True),
        MyNorm(3),
        MyDropout(0.1),
        MyAttention(4, 2, batch_first=True),
        nn.utils.parametrizations.weight_norm(nn.GRU(3, 3, batch_first=True), "weight_hh_l0"),
        hooked(nn.Dropout(0.1)),
        hooked(nn.BatchNorm1d(3), "register_forward_pre_hook"),
        hooked(nn.LSTM(3, 3, batch_first=True), "register_full_backward_hook"),
        with_forward(nn.GRU(3, 3, batch_first=True)),
        complex_parameter(nn.Linear(2, 2)),
        nn.Embedding(3, 3, scale_grad_by_freq=True),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.SyncBatchNorm(3),
        nn.LSTM(3, 3),
        nn.RNN(3, 3),
        nn.GRU(3, 3),
        nn.GRU(3, 3, 2, batch_first=True),
        nn.GRU(3, 3, bidirectional=True, batch_first=True),
        nn.AlphaDropout(),
        nn.RReLU(),
        nn.Dropout(1.0),
        nn.MultiheadAttention(4, 2),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.LazyLinear(3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_cannot_be_supported_are_refused_with_a_cure(layer):
    with refuses(ModelError, "audio.encoder.0"):
        adopt(nn.Sequential(layer), Rows(), "audio.encoder")
