"""A hostile server reads rows of `gray`, whose parameters may not leave, from the parameters of the block `color`.

The attacks are possible under models that mix modalities. A device refuses them under its policy, and the same attacks
succeed if its owner lets the parameters of `shared` leave. Before, `concat` with a hidden head and `sum` counted as not
mixing, and a raw gray image was read to 9e-5, also under all limits.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from polyfed.algorithms.base import Broadcast
from polyfed.algorithms.local import Start
from polyfed.algorithms.personal.blocks import Wanted
from polyfed.core.messages import Message
from polyfed.core.tasks import tasks_of, types_of
from polyfed.core.tree import Tree, digest
from polyfed.deploy.handlers import Deployed
from polyfed.engines.protocol import REPLY, Facts, RequestId, versions
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.assembly import initial_of, model_of
from polyfed.federation.wire.wire_format import Packet, decode, encode
from polyfed.privacy.egress.policy import Policy

GRAY, COLOR = 6, 4
CLOSED = (
    '[egress.gray]\nserver = []\nsilo = []\n[egress.labels]\nserver = []\n[egress.shared]\nserver = ["statistic"]\n'
)
OPEN = CLOSED.replace('["statistic"]', '["statistic", "parameters"]')
RECIPE = """
seed = 1
rounds = 40
[data]
name = "npz"
path = "x.npz"
modalities = ["gray", "color"]
[clients]
num = 2
[model]
fusion = "{fusion}"
embedding = 6
head = {head}
[model.encoders]
gray = {{ kind = "mlp", hidden = [] }}
color = {{ kind = "mlp", hidden = [] }}
[train]
steps = {steps}
batch_size = 1
lr = {lr}
{train}
[algorithm]
name = "{method}"
{options}
"""


def text(fusion: str = "concat", head: Any = (), method: str = "fedavg", train: str = "", **more: Any) -> str:
    options = 'private = ["gray", "shared"]' if method == "fedavg" else ""
    told = {"steps": 1, "lr": 1.0} | more
    return RECIPE.format(fusion=fusion, head=list(head), method=method, train=train, options=options, **told)


class Device:
    """One device with its real handler, and the server that asks it."""

    def __init__(self, folder: Path, recipe: str, policy: str, rows: int = 1) -> None:
        rng = np.random.default_rng(0)
        self.gray = rng.uniform(0, 1, (rows, GRAY)).astype(np.float32)
        color = rng.normal(size=(rows, COLOR)).astype(np.float32)
        np.savez(folder / "data.npz", gray=self.gray, color=color, label=np.arange(rows) % 2)
        (folder / "policy.toml").write_text(policy)
        self.path = folder / "recipe.toml"
        self.node = {
            "data": str(folder / "data.npz"), "policy": str(folder / "policy.toml"), "state": str(folder / "state"),
            "client": 1, "modalities": "gray,color",
        }  # fmt: skip
        self.sends(recipe)
        self.handler = Deployed(self.path)

    def sends(self, recipe: str) -> None:
        """From now on, the app of the server holds this recipe."""
        self.path.write_text(recipe)
        self.recipe = load_recipe(self.path)
        shapes = {"gray": (GRAY,), "color": (COLOR,)}
        self.model = model_of(self.recipe, shapes, 2, Policy.parse(self.recipe.egress, shapes))
        self.initial = initial_of(self.recipe, self.model)

    def ask(self, task: str, message: Message, run: str, round: int = 1, number: int = 0) -> Any:
        """The device's reply, or the reason for which it sends none."""
        facts = asdict(Facts(self.model.shapes, 2, digest(self.model.frozen)))
        about = {"task": task, "seed": 0, "rounds": 40, "turn": 0, "modalities": ["gray", "color"], "kept": 0}
        header = RequestId(run, 1, round, number, 1).header(want="ask", facts=facts, **versions(), **about)
        sent = encode(message)
        answer = self.handler(Packet(header | sent.header, sent.body), self.node)
        if answer.header["verdict"] != REPLY:
            return str(answer.header["reason"])
        return decode(answer, types_of(tasks_of(self.recipe.algorithm)[task])[1], limit=2**20)

    def color(self) -> Tree:
        return {name: value.clone() for name, value in self.initial.items() if name.startswith("color")}


def gated_rows(device: Device, asks: int = 22) -> Any:
    """The row of `gray` that the gates of the head tell, by bisection of the threshold of each hidden unit.

    One unit of `color` is constant, so its column of the fusion is a threshold for each hidden unit. A unit whose gate
    is closed has no gradient in this column.
    """
    w, start = device.color(), {name: value.double().numpy() for name, value in device.initial.items()}
    w["color.encoder.0.weight"].zero_()
    w["color.encoder.0.bias"].zero_()[0] = 1.0
    by_row = start["gray.fusion.weight"] @ start["gray.encoder.0.weight"]
    constant = start["gray.fusion.weight"] @ start["gray.encoder.0.bias"] + start["shared.bias"]
    low, high = np.full(len(by_row), -8.0), np.full(len(by_row), 8.0)
    for ask in range(asks):
        middle = (low + high) / 2
        w["color.fusion.weight"].zero_()[:, 0] = torch.from_numpy(-middle - constant).float()
        answer = device.ask("update", Broadcast(w), f"run{ask}")
        if isinstance(answer, str):
            return answer
        assert {name.partition(".")[0] for name in answer.params} == {"color"}
        moved = answer.params["color.fusion.weight"] - w["color.fusion.weight"]
        opened = (moved.abs().sum(1) > 0).numpy()
        low, high = np.where(opened, middle, low), np.where(opened, high, middle)
    return np.linalg.lstsq(by_row, (low + high) / 2, rcond=None)[0]


def row_of_two_steps(device: Device) -> Any:
    """The row of `gray` that two steps with one output layer for all modalities tell.

    The server makes the error as large as it can be, by a large weight of `color`. The first step then writes the sum
    of the embeddings into the output layer, and the second step multiplies this layer by the same error.
    """
    start = {name: value.double() for name, value in device.initial.items()}
    head, lr = start["shared.head.0.weight"], device.recipe.algorithm.train.lr
    towards = (head[0] - head[1]) / (head[0] - head[1]).norm()
    for size in (150.0, -150.0):
        w = device.color()
        w["color.encoder.0.bias"].zero_()
        w["color.encoder.0.weight"].copy_(torch.outer(size * towards, torch.tensor([1.0, 0, 0, 0])))
        answer = device.ask("update", Broadcast(w), f"run{size:g}")
        if isinstance(answer, str):
            return answer
        moved = answer.params["color.encoder.0.bias"].double() / -lr
        for error in (torch.tensor([1.0, -1.0]).double(), torch.tensor([-1.0, 1.0]).double()):
            found = (2 * head.T @ error - moved) / (2 * lr)
            if moved.abs().max() < 1e-6 or (moved - 2 * head.T @ error).norm() > 0.5 * moved.norm():
                continue  # the label is the class that the server made certain, or the other error
            across = found - (found @ towards) * towards  # the embedding of color is along `towards`
            gray = start["gray.encoder.0.weight"], start["gray.encoder.0.bias"]
            return across.numpy(), tuple(value.numpy() for value in gray), towards.numpy()
    raise AssertionError("one of the two errors is not 0")


ACCEPTING = CLOSED + '[egress.color]\naccept = ["parameters"]\n'
"""The device also trains parameters that it may not send."""

LIMITS = "[limits]\nmin_rows = 50\nmin_batch_size = 32\nmin_steps = 10\n"


def test_gates_of_a_hidden_layer_tell_a_row_only_if_shared_parameters_may_leave(tmp_path: Path) -> None:
    recipe = text(head=(24,))
    for policy in (OPEN, CLOSED, ACCEPTING):
        (folder := tmp_path / str(len(policy))).mkdir()
        device = Device(folder, recipe, policy)
        found = gated_rows(device)
        if policy == OPEN:
            np.testing.assert_allclose(found, device.gray[0], atol=1e-3)
        else:
            assert f"client 1 refused to {'take Broadcast' if policy == CLOSED else 'send Update'}.params" in found
            assert "parameters of color may not go to the server (the model mixes the modalities: " in found
            assert "[model] head = [] avoids this" in found


def test_gates_of_many_rows_do_not_leave_under_limits_either(tmp_path: Path) -> None:
    """A first layer of `color` can sort rows into bins, so a minimum batch size does not hide the gates of a row."""
    recipe = text(head=(24,)).replace("steps = 1\nbatch_size = 1", "epochs = 5\nbatch_size = 32")
    found = gated_rows(Device(tmp_path, recipe, ACCEPTING + LIMITS, rows=64))
    assert "parameters of color may not go to the server (the model mixes the modalities: " in found


def test_two_steps_of_a_sum_tell_a_row_only_if_shared_parameters_may_leave(tmp_path: Path) -> None:
    recipe = text("sum", steps=2, lr=1e-3)
    for policy in (OPEN, CLOSED, ACCEPTING):
        (folder := tmp_path / str(len(policy))).mkdir()
        device = Device(folder, recipe, policy)
        found = row_of_two_steps(device)
        if policy == OPEN:
            across, (weight, bias), towards = found
            embedding = weight @ device.gray[0] + bias
            np.testing.assert_allclose(across, embedding - (embedding @ towards) * towards, atol=0.02)
        else:
            assert 'fusion = "sum" trains the same output layers with all of them' in found


def test_state_from_a_recipe_that_mixes_does_not_leave_under_one_that_does_not(tmp_path: Path) -> None:
    """The server trains the client's own model under the first recipe, and asks for it under the second."""
    apart, mixed = text(method="fedamp"), text(method="fedamp", train="clip_norm = 0.01")
    wanted = Wanted({"color": torch.ones(())})
    device = Device(tmp_path, mixed, CLOSED)
    assert not isinstance(device.ask("train_own", Start(), "run"), str)
    device.sends(apart)
    refused = device.ask("upload", wanted, "run", number=1)
    assert "the local state of this run was trained with a model that mixes modalities, so 'color'" in refused
    assert not isinstance(device.ask("train_own", Start(), "new"), str)
    sent = device.ask("upload", wanted, "new", number=1)
    assert {name.partition(".")[0] for name in sent.params} == {"color"}
