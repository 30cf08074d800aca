"""A device compares what a server sends with the model and with the message's declaration, before anything is spent."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="the extra polyfed[flower] is not installed")

from engines.direct import grid_of, joined, played
from laws.rows import PROTOTYPES, ROWS
from laws.test_laws import world
from polyfed.core.messages import OF_THE_MODEL, Declared
from polyfed.core.tasks import tasks_of, types_of
from polyfed.core.tree import Tree, block_of
from polyfed.deploy.device.runtime import ClientRuntime
from polyfed.engines.protocol import FAILED
from polyfed.evaluation.scores import Evaluation
from polyfed.experiment.recipes.recipe import DeploymentSpec, EngineSpec
from polyfed.federation.wire_format import Packet, decode, encode


def entries(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A change of every tensor of a field."""
    return lambda v: change(v) if isinstance(v, Tensor) else {name: change(t) for name, t in v.items()}


def floats(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """A change of every tensor of a field that holds floating-point numbers."""
    return entries(lambda t: change(t) if t.is_floating_point() else t)


TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool, "uint8": torch.uint8, "": torch.float32}

CORRUPT: dict[str, Callable[[Any], Any]] = {
    "an extra axis": entries(lambda t: t.unsqueeze(0)),
    "a row for each sample": floats(lambda t: t.expand(5, *t.shape).clone()),
    "another shape": entries(lambda t: torch.cat([t, t], -1) if t.dim() and t.numel() else t),
    "float64": floats(Tensor.double),
    "float16": floats(Tensor.half),
    "NaN": floats(lambda t: t * torch.nan),
    "infinity": floats(lambda t: t + torch.inf),
    "int32": entries(lambda t: t.to(torch.int32)),
    "int64": entries(lambda t: t.to(torch.int64)),
    "truth values": entries(Tensor.bool),
    "an extra name": lambda v: v if isinstance(v, Tensor) or not v else v | {"stranger": next(iter(v.values()))},
}


def lacking(value: Tree) -> Tree:
    """A tree without one tensor of a block that has others."""
    return {name: t for name, t in value.items() if not name.endswith("encoder.0.bias")}


def without_a_block(value: Tree) -> Tree:
    """A tree without the block of its first tensor."""
    return {name: t for name, t in value.items() if block_of(name) != block_of(next(iter(value)))}


def corruptions(said: Declared, whole: bool) -> dict[str, Callable[[Any], Any]]:
    """The corruptions that a field of this declaration must not have; `whole` if it must hold every block."""
    found = dict(CORRUPT)
    if said.kind == "raw":  # the samples of some modalities are whole numbers
        del found["int64"]
    if said.kind in OF_THE_MODEL and (whole or not said.partial):
        found["a missing name"] = lacking
    if whole and not said.bare:
        found |= {"a missing block": without_a_block, "no block": lambda value: {}}
    if said.within is not None:
        for word, number in (("a number below its range", -1), ("a number above its range", 2**62)):
            outside = torch.tensor(number, dtype=TYPES[said.dtype])
            if not bool(said.within.holds(outside)):
                found[word] = entries(lambda t, number=number: torch.full_like(t, number))
    return found


def unlike(one: Any, other: Any) -> bool:
    """Whether two fields differ in form or in a number."""
    if isinstance(one, Tensor):
        return one.dtype != other.dtype or one.shape != other.shape or bool(one.numel() and (one != other).any())
    return list(one) != list(other) or any(unlike(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_device_refuses_each_corrupt_message_of_each_method(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(
        world(name), rounds=2, engine=EngineSpec(name="flower"), deployment=DeploymentSpec(relay="server-sees")
    )
    made = replace(made, clients=replace(made.clients, personal_test=0.2))
    faults, tried, work = list[str](), set[tuple[str, str, str]](), ClientRuntime._work

    def attacked(self: ClientRuntime, packet: Packet, request_id: Any) -> Packet:
        """Try each corruption of each field once, then answer the honest request."""
        task = packet.header["task"]
        got = types_of(tasks_of(made.algorithm)[task])[0]
        msg = decode(packet, got, limit=2**30)
        before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        for field, said in got.declared.items():
            whole = not said.optional and not (said.kind in OF_THE_MODEL and made.algorithm.may_lack(task))
            for how, change in corruptions(said, whole).items():
                value = getattr(msg, field)
                if (task, field, how) in tried or not unlike(value, changed := change(value)):
                    continue
                tried.add((task, field, how))
                sent = encode(replace(msg, **{field: changed}))
                monkeypatch.setattr(ClientRuntime, "_work", work)
                answer = self.answer(Packet(packet.header | sent.header, sent.body), request_id.client)
                monkeypatch.setattr(ClientRuntime, "_work", attacked)
                text = str(answer.header.get("reason"))
                if answer.header["verdict"] != FAILED or got.__name__ not in text or field not in text:
                    faults.append(f"{task}.{field} with {how}: {answer.header['verdict']}, {text:.150}")
        if before != sorted(path for path in tmp_path.rglob("*") if path.is_file()):
            faults.append(f"{task}: a refused request left a file")
        return work(self, packet, request_id)

    monkeypatch.setattr(ClientRuntime, "_work", attacked)
    parts = joined(made, grid_of(made, tmp_path))
    state, _ = played(made, parts)
    made.algorithm.evaluate(state, parts.fed)
    assert not faults, "\n".join(faults)
    assert tried or name in ("centralized", "local"), "the server sent nothing"


@pytest.mark.parametrize("unimodal", ["auto", "prototype"])
@pytest.mark.parametrize("name", ["fedavg", "moon", "fedgkt", "pfmml", "hfm"])
def test_an_honest_evaluation_is_not_refused(name: str, unimodal: Any, tmp_path: Path) -> None:
    if unimodal == "prototype" and name not in ("fedavg", "moon"):
        pytest.skip("its clients send no class means")
    made = world(name, evaluation=Evaluation(every=0, unimodal=unimodal))
    clients = replace(made.clients, personal_test=0.2)
    made = replace(
        made,
        rounds=1,
        clients=clients,
        engine=EngineSpec(name="flower"),
        deployment=DeploymentSpec(relay="server-sees"),
    )
    if unimodal == "prototype":
        made = replace(made, egress=PROTOTYPES | {"shared": {"server": ["parameters", "statistic"]}})
    parts, missing = joined(made, grid_of(made, tmp_path)), list[str]()
    state, _ = played(made, parts)
    parts.fed.emit = lambda kind, **facts: missing.append(facts["reason"]) if kind == "client-missing" else None
    measured = made.algorithm.evaluate(state, parts.fed)
    assert "personal" in measured.metrics
    assert not missing
