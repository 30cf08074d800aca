"""A server skips the enrolment and tries facts about the federation until the data of a device fits them."""

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import Devices
from polyfed.engines.protocol import REFUSED, Facts, RequestId, hello, versions
from polyfed.federation.wire.wire_format import Packet

POLICIES = {
    "no statistic": '[egress.shared]\nserver = ["parameters"]\n',
    "too few rows": "[limits]\nmin_rows = 1000\n",
}
"""Policies under which the device takes no part."""

Shapes = dict[str, tuple[int, ...]]
GUESSES: list[tuple[Shapes, int]] = [
    ({"a": (16,), "b": (16,)}, 4),  # these are right
    ({"a": (16,), "b": (16,)}, 1),
    ({"a": (5,), "b": (16,)}, 4),
    ({"b": (16,)}, 4),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_device_that_takes_no_part_tells_no_server_whether_a_guess_is_right(policy: str, tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    (devices.places[1] / "policy.toml").write_text(POLICIES[policy])
    said = [devices.handler(hello(), devices.configs[1]).header]
    about = {"task": "update", "seed": 0, "rounds": 2, "turn": 0, "modalities": ["a"], "kept": 0, "want": "ask"}
    for shapes, num_classes in GUESSES:
        facts = asdict(Facts(shapes, num_classes))
        header = RequestId("run", 1, 1, 0, 1).header(facts=facts, **versions(), **about)
        said.append(devices.handler(Packet(header), devices.configs[1]).header)
    assert {entry["verdict"] for entry in said} == {REFUSED}
    assert len({entry["reason"] for entry in said}) == 1, "the same answer to every guess"
