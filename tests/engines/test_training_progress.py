"""A training on a device survives its process and its link."""

import json
import logging
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from typing_extensions import override

import polyfed
from engines.own_devices import InThreads, OwnDevices
from engines.rough_link import Proxy
from polyfed.core.errors import RecipeError
from polyfed.data.sources import Toy
from polyfed.deploy.device import agent, tasks
from polyfed.deploy.device.agent import Running
from polyfed.deploy.device.configuration import node_from
from polyfed.deploy.device.memory import trainings as memory_of_trainings
from polyfed.deploy.device.memory.store import DeviceStore
from polyfed.deploy.device.memory.trainings import KeptProgress, forget_trainings
from polyfed.engines.protocol import RequestId
from polyfed.laws.checks import Died
from polyfed.model import ModelSpec, build_model
from polyfed.training import SingleClientData
from polyfed.training.optimisers import Train
from polyfed.training.progress import MOST_TRAININGS, PartOfTraining, Progress
from polyfed.transport import connection
from refusals import refuses
from world import PLAIN

RECIPE = """
seed = 1
rounds = 2
[data]
name = "cg-digits"
[clients]
num = 2
personal_test = 0.2
[model]
embedding = 8
[model.encoders]
gray = { kind = "mlp", hidden = [16] }
color = { kind = "mlp", hidden = [16] }
[train]
steps = 5
batch_size = 200
momentum = 0.9
[algorithm]
name = "fedrep"
private_epochs = 1
[evaluate]
every = 0
"""
"""Each task trains twice, and a client keeps private parameters."""


class Mortal(InThreads):
    """The process of tasks dies after some of the states that a task keeps."""

    def __init__(self, after: tuple[int, ...]) -> None:
        super().__init__()
        self.after, self.seen = after, list[set[str]]()

    @override
    def begin(self, **task: Any) -> Running:
        running = Running(0)

        def work() -> None:
            with self._one:
                for steps in (*self.after, 0):
                    try:
                        with dying(steps):
                            running.facts = tasks.answer(task)
                    except Died:
                        self.seen.append({path.name for path in trainings(Path(task["config"]["state"]))})
                        assert not (Path(task["folder"]) / "reply").exists()
                        continue
                    break
            running.ended.set()

        Thread(target=work, daemon=True).start()
        return running


def trainings(state: Path) -> list[Path]:
    return [*state.rglob("*training-*")]


@contextmanager
def dying(steps: int) -> Iterator[None]:
    """Die after so many states have been kept; 0 for never."""
    keep, left = KeptProgress.keep, [steps]

    def keeps(self: KeptProgress, number: int, part: PartOfTraining) -> None:
        keep(self, number, part)
        left[0] -= 1
        if not left[0]:
            raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptProgress, "keep", keeps)
        patch.setattr(Progress, "share", 0.0)
        yield


def test_a_killed_task_goes_on_to_the_same_reply(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = tmp_path / "reference.toml"
    recipe.write_text(RECIPE)
    whole = polyfed.run(recipe, engine="sequential").result["state_sha256"]
    mortal = Mortal((2, 1, 3))
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("engines.own_devices.InThreads", lambda: mortal)
        made = OwnDevices(tmp_path, RECIPE, more=lambda client: "checkpoint_seconds = 1e-9")
        made.began()
        try:
            assert made.run()["state_sha256"] == whole
        finally:
            made.ended()
    assert len(mortal.seen) == 3 * 2 * 2, "each task of two rounds and clients has died three times"
    assert [{name.partition(".")[0].removeprefix("training-") for name in names} for names in mortal.seen[:3]] == [
        {"000001-000-00-2"},
        {"000001-000-00-3"},
        {"000001-000-00-3", "000001-000-01-2"},
    ], "the steps of the first training, and of the second"
    assert not [path for client in range(2) for path in trainings(made.state(client))], "they go with the reply"


@contextmanager
def own(folder: Path, run: str = "run") -> Iterator[Callable[..., KeptProgress]]:
    """What makes the progress of a task of client 3."""
    with DeviceStore(folder).alone(run, 3) as store:
        assert store is not None

        def progress(use: str = "use", round: int = 1) -> KeptProgress:
            return KeptProgress(store, RequestId(run, 0, round, 0, 3), use, 0.0)

        yield progress


PART = PartOfTraining(
    {"b": torch.rand(3), "a": torch.rand(2, 2)},
    {"momentum": {"b": torch.rand(3)}},
    {"carry": torch.tensor(1)},
    [torch.tensor(0.5), torch.tensor(0.25)],
)


def test_what_is_kept_of_a_training_comes_back(tmp_path: Path) -> None:
    with own(tmp_path) as progress:
        progress().keep(0, replace(PART, losses=[]))
        progress().keep(0, PART)
        found = progress().found(0)
        assert found is not None
        assert [*found.params] == ["b", "a"]
        assert all(torch.equal(value, PART.params[name]) for name, value in found.params.items())
        assert torch.equal(found.moments["momentum"]["b"], PART.moments["momentum"]["b"])
        assert int(found.carry["carry"]) == 1
        assert [float(loss) for loss in found.losses] == [0.5, 0.25]
        assert progress().found(1) is None
    (path,) = trainings(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "nobody else reads it, and of a training one state is kept"


def test_another_message_policy_or_state_begins_from_the_start(tmp_path: Path) -> None:
    with own(tmp_path) as progress:
        progress().keep(0, PART)
        assert progress("another").found(0) is None
        with progress().store.transaction() as memory:
            forget_trainings(memory, progress("another"))
    assert not trainings(tmp_path), "nor does the old one stay"


def test_another_number_of_threads_begins_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own(tmp_path) as progress:
        progress().keep(0, PART)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        assert progress().found(0) is None


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), Path.unlink])
def test_a_damaged_state_is_not_used(damage: Callable[[Path], None], tmp_path: Path) -> None:
    with own(tmp_path) as progress:
        progress().keep(0, PART)
        (path,) = trainings(tmp_path)
        damage(path)
        assert progress().found(0) is None, "the training begins again, and no run ends because of it"
        progress().keep(0, PART)
        assert progress().found(0) is not None


def test_a_full_disk_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with own(tmp_path) as progress:
        progress().keep(0, PART)
        monkeypatch.setattr(memory_of_trainings, "save_file", full)
        progress().keep(0, replace(PART, losses=[*PART.losses, torch.tensor(0.1)]))
        found = progress().found(0)
        assert found is not None
        assert len(found.losses) == 2, "the state before stays"
        with progress().store.transaction():
            pass
    assert len(trainings(tmp_path)) == 1, "and no half of a file"


COLUMNS = Toy(rows=60, classes=3).load()
MODEL = build_model(ModelSpec(embedding=4, encoders=PLAIN), {"a": (16,), "b": (24,)}, 3)


class Counting(Progress):
    """Notes what it is asked to keep."""

    share = 0.0

    def __init__(self) -> None:
        super().__init__(0.0)
        self.kept: list[tuple[int, int]] = []

    @override
    def found(self, number: int) -> None:
        return None

    @override
    def keep(self, number: int, part: PartOfTraining) -> None:
        self.kept.append((number, len(part.losses)))


def data(**parts: Any) -> SingleClientData:
    return SingleClientData(COLUMNS, torch.arange(40), ("a", "b"), MODEL, 1, 1, 1, **parts)


def test_trainings_are_numbered_and_those_within_a_step_are_not() -> None:
    progress, start = Counting(), MODEL.init(0)
    one, train = data(progress=progress), Train(steps=2, batch_size=8)

    def loss(w: Any, batch: Any) -> Any:
        return MODEL.logits(w, batch).square().mean()

    def direction(grads: Any, w: Any, aux: Any, carry: Any) -> Any:
        one.minimise(loss, {name: value.detach().clone() for name, value in w.items()}, train=train)
        return grads, carry

    one.minimise(loss, start, train=train, direction=direction)
    one.at(torch.arange(20)).minimise(loss, start, train=train)
    steps = [place for place in progress.kept if place[1]]
    assert sorted(set(steps)) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    progress.kept.clear()
    for _ in range(MOST_TRAININGS):
        one.minimise(loss, start, train=train)
    assert max(number for number, _ in progress.kept) == MOST_TRAININGS - 1, "which bounds the disk"


def test_noise_of_the_system_is_not_kept() -> None:
    class Noisy:
        def refuse(self, job: Any) -> None: ...

        def gradient(self, loss: Any, leaves: Any, rest: Any, batch: Any, size: int) -> Any:
            return {name: torch.zeros_like(value) for name, value in leaves.items()}, torch.zeros(())

    progress = Counting()
    noisy = data(progress=progress, privacy=Noisy())
    noisy.minimise(lambda w, b: MODEL.logits(w, b).mean(), MODEL.init(0), train=Train(steps=2, batch_size=8))
    assert not progress.kept


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_seconds_are_a_number_of_0_or_more(seconds: str) -> None:
    with refuses(RecipeError, "checkpoint_seconds"):
        node_from(f'data="d.npz" client=0 modalities="a" checkpoint_seconds={seconds}')


def test_a_training_goes_on_while_the_link_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SECONDS", 0.3)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.1)
    begun, held = list[str](), list[float]()

    class Watched(InThreads):
        @override
        def begin(self, **task: Any) -> Running:
            begun.append(json.loads((Path(task["folder"]) / "header").read_text()).get("task", ""))
            proxy.held = begun[-1] != ""  # from here on nothing passes, until the training has ended
            running = super().begin(**task)

            def release() -> None:
                running.ended.wait()
                held.append(proxy.held)
                proxy.held = False

            Thread(target=release, daemon=True).start()
            return running

    recipe = RECIPE.replace("num = 2", "num = 1").replace("rounds = 2", "rounds = 1")
    (tmp_path / "reference.toml").write_text(recipe)
    whole = polyfed.run(tmp_path / "reference.toml", engine="sequential").result["state_sha256"]
    monkeypatch.setattr("engines.own_devices.InThreads", Watched)
    step = Train.step

    def slow(self: Train, *args: Any) -> None:
        step(self, *args)
        if proxy.held:
            connection.time.sleep(0.15)

    monkeypatch.setattr(Train, "step", slow)
    made = OwnDevices(tmp_path, recipe)
    proxy = Proxy(int(made.told["server"].rpartition(":")[2]))
    made.told["server"] = f"127.0.0.1:{proxy.port}"
    made.began()
    try:
        assert made.run()["state_sha256"] == whole
    finally:
        made.ended()
        proxy.close()
    assert begun.count("update") == 1, "the training was not begun again"
    assert any(held), "the link was down when the training ended"
