"""A device that alone has a modality claims a sample shape, and the server builds the encoder from it."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from attacks.test_hostile_device import blind
from engines.devices import Devices
from engines.direct import over
from polyfed.deploy.server import claimed_shapes
from polyfed.deploy.server.claimed_shapes import flaws_of, without_absent
from polyfed.deploy.server.enrolment import Admission
from polyfed.deploy.server.server import serve
from polyfed.engines.protocol import Enrolment
from polyfed.experiment.recipes.recipe import parse_recipe
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.loop import execute
from polyfed.federation.wire.wire_format import Packet
from polyfed.model.encoders.catalogue import ENCODERS
from refusals import warned

LONER = 3
"""The device that lies; it alone holds modality `b`."""

RECIPE = """
seed = 3
rounds = 1
[data]
name = "toy"
rows = 240
classes = 4
[clients]
partition = "iid"
num = 4
holdings = [["a"], ["a"], ["a"], ["b"]]
[model]
embedding = 6
[model.encoders]
a = { kind = "mlp", hidden = [8] }
b = { kind = "mlp", hidden = [8] }
[algorithm]
name = "scaffold"
[egress.b]
server = ["parameters", "gradients", "statistic"]
[deployment]
enrol_seconds = 2.0
min_nodes = 2
message_megabytes = 1
"""


def said(folder: Path, shape: list[int], capsys: Any, recipe: str = RECIPE) -> str:
    """The log of a server without rows of its own, where the loner claims this shape."""
    devices, out = Devices(folder, recipe), folder / "out"
    text = (devices.app / "recipe.toml").read_text()
    data = '[data]\nname = "npz"\npath = "/nowhere.npz"\nmodalities = ["a", "b"]\n[clients]\nnum = 4\n'
    text = text[: text.index("[data]")] + data + text[text.index("[model]") :]
    (devices.app / "recipe.toml").write_text(text)

    def lying(packet: Packet, config: Mapping[str, Any]) -> Packet:
        reply = devices(packet, config)
        lies = config["partition-id"] == LONER and reply.header.get("verdict") == "enrolled"
        return Packet(reply.header | {"shapes": {"b": shape}}, reply.body) if lies else reply

    with warned("measures nothing"):
        serve(devices.app / "recipe.toml", over(lying, 4), {"out": str(out)}, execute)
    assert json.loads((out / "result.json").read_text())["rounds"] == 1, "the run came to its end"
    return str(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            [2**24],
            "it would need a tensor of 536,870,912 bytes ([deployment] message_megabytes = 1). If this shape is right",
        ),
        ([25_000], "its parameters would take 800,"),  # it would fit, but SCAFFOLD sends control variates too
    ],
)
def test_the_only_holder_of_a_modality_cannot_make_the_server_build_an_enormous_encoder(
    shape: list[int], words: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    largest = [0]
    empty_like = torch.empty_like

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty_like(*args, **kwargs)
        largest[0] = max(largest[0], 0 if made.is_meta else made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty_like", noted)
    told = said(tmp_path, shape, capsys)
    assert "client 3: for samples of 'b' with shape" in told
    assert words in told
    assert "set [deployment] shapes = { b = [...] }" in told
    assert "no client that takes part has 'b', so the model has no encoder for it" in told
    assert "starting with 3 of 4 clients" in told
    assert largest[0] < 2**18


class OfVectors(nn.Module):
    """A user's encoder that reads vectors only, and cannot run on the device `meta`."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[0], embedding)

    def forward(self, x: Tensor) -> Tensor:
        scale = float(self.layer.weight.sum())  # impossible on `meta`
        assert x.dim() == 2, "vectors only"
        return cast(Tensor, self.layer(x * scale))


USERS = "attacks.test_claimed_shapes:OfVectors"


def test_a_shape_that_the_encoder_cannot_read_costs_its_claimant_the_place_and_not_all_the_run(
    tmp_path: Path, capsys: Any
) -> None:
    recipe = RECIPE.replace('b = { kind = "mlp", hidden = [8] }', f'b = {{ kind = "{USERS}" }}')
    told = said(tmp_path, [3, 3], capsys, recipe)
    assert "it cannot read them: AssertionError: vectors" in told
    assert "starting with 3 of 4 clients" in told


def test_the_only_holder_of_a_modality_cannot_end_the_run_with_samples_without_axes(
    tmp_path: Path, capsys: Any
) -> None:
    """No file has such samples, and no encoder reads them, so the server could not build the model."""
    told = said(tmp_path, [], capsys)
    assert "enrolled with a number out of range" in told
    assert "starting with 3 of 4 clients" in told


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("mlp", (2**23,), "a tensor of 2,147,483,648 bytes"),
        ("cnn4", (4096, 4096), "a tensor of"),  # few parameters, large activations
        ("conv-gru", (2**22, 4), "a tensor of"),
        ("cnn4", (5,), "the samples have shape (5,)"),
        ("mlp", (6,), ""),
        ("cnn4", (3, 64, 64), ""),
        ("resnet18", (3, 32, 32), ""),
        ("conv-gru", (50, 6), ""),
    ],
)
def test_the_cost_of_an_encoder_is_known_before_it_is_built(kind: str, shape: tuple[int, ...], words: str) -> None:
    made = blind()
    made = replace(made, model=replace(made.model, encoders={"a": ENCODERS[kind]()}, embedding=64))
    flaws = flaws_of(made, [("a", shape)])
    assert words in flaws.get("a", "")
    assert bool(flaws) == bool(words)


def test_parameters_of_all_claims_count_together_and_so_do_operations(monkeypatch: Any) -> None:
    made = blind("message_megabytes = 1\n")
    small = ENCODERS["mlp"](hidden=(128,) * 4)  # type: ignore[call-arg]
    made = replace(made, model=replace(made.model, encoders={"a": small, "b": small}))
    assert flaws_of(made, [("a", (6,))]) == {}
    assert [*flaws_of(made, [("b", (6,)), ("a", (6,))])] == ["a"]
    monkeypatch.setattr(claimed_shapes, "MAX_OPERATIONS", 50)
    steps = parse_recipe(made.table() | {"model": {"encoders": {"a": {"kind": f"{__name__}:ByStep"}}}})
    assert "it would take more than 50 operations" in flaws_of(steps, [("a", (500, 6))])["a"]
    assert flaws_of(steps, [("a", (5, 6))]) == {}


class ByStep(nn.Module):
    """A user's encoder that reads a sequence step by step."""

    def __init__(self, shape: tuple[int, ...], embedding: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape[1] + embedding, embedding)
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.embedding)
        for step in range(x.shape[1]):
            state = self.layer(torch.cat([x[:, step], state], 1))
        return state


RECURRENT = {
    "gru": lambda: nn.GRU(4, 6, batch_first=True),
    "gru of two layers, both directions, time first": lambda: nn.GRU(4, 6, num_layers=2, bidirectional=True),
    "lstm": lambda: nn.LSTM(4, 6, batch_first=True),
    "lstm with projections": lambda: nn.LSTM(4, 6, batch_first=True, bidirectional=True, proj_size=3),
    "rnn": lambda: nn.RNN(4, 6, num_layers=2, batch_first=True),
    "rnn with relu": lambda: nn.RNN(4, 6, nonlinearity="relu"),
}


def shapes_of(results: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tree_leaves(results)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_whose_steps_are_not_computed_gives_results_of_the_same_shapes(name: str) -> None:
    true = shapes_of(RECURRENT[name]()(torch.zeros(2, 9, 4)))
    with torch.device("meta"), claimed_shapes._OneStep():
        assert shapes_of(RECURRENT[name]()(torch.zeros(2, 9, 4))) == true


@pytest.mark.parametrize("kind", ["conv-gru", "conv2d-gru"])
@pytest.mark.parametrize("length", [40_000, 2**20])
def test_a_claim_of_a_very_long_sequence_costs_the_server_little_time(kind: str, length: int) -> None:
    """The server ran every step of the GRU on the device `meta`: 13 seconds for 40,000 steps."""
    made = blind()
    made = replace(made, model=replace(made.model, encoders={"a": ENCODERS[kind]()}, embedding=64))
    started = time.process_time()
    flaws_of(made, [("a", (length, 3) if kind == "conv-gru" else (1, length, 16))])
    assert time.process_time() - started < 4


def test_the_gates_of_a_recurrent_layer_count_as_memory() -> None:
    """The states of all steps would fit into 512 MiB, and the gates do not."""
    made = blind("message_megabytes = 512\n")
    made = replace(made, model=replace(made.model, encoders={"a": ENCODERS["conv-gru"]()}, embedding=128))
    assert "a tensor of" in flaws_of(made, [("a", (2**22, 3))])["a"]


def test_the_shape_that_many_clients_report_uses_up_the_limit_before_the_shape_of_a_single_client() -> None:
    made = blind("message_megabytes = 1\n")
    small = ENCODERS["mlp"](hidden=(128,) * 4)  # type: ignore[call-arg]
    made = replace(made, model=replace(made.model, encoders={"a": small, "b": small}))
    known = [Enrolment(k, 9, (m,), None, False, {m: (6,)}, 4) for k, m in enumerate(["a", "b", "b"])]
    found = Admission.of(made, known, 3, Emitter())
    assert ([*found.left_out], [*found.shapes]) == ([0], ["b"])


def test_a_recipe_keeps_all_encoders_of_modalities_that_are_there() -> None:
    made = blind()
    assert without_absent(made, ("a", "b")) is made
    assert without_absent(made, ()) is made
    assert [*without_absent(made, ("b",)).model.encoders] == ["b"]
