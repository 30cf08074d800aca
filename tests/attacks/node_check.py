"""What `polyfed check --node` says about a recipe and a device that the recipe does not satisfy."""

import json
from typing import Any

import pytest

from engines.devices import Devices
from polyfed.cli import main


def checked(devices: Devices, node: str, capsys: Any, *more: str) -> tuple[Any, str]:
    """The exit code and the output of `polyfed check --node`."""
    with pytest.raises(SystemExit) as stop:
        main(("check", str(devices.recipe), "--node", node, *more))
    return stop.value.code, capsys.readouterr().out


def config_of(devices: Devices, modalities: str) -> str:
    """The node's configuration of the second device."""
    place = devices.places[1]
    return f'data="{place}/data.npz" client=1 modalities="{modalities}" policy="{place}/policy.toml"'


def refused(devices: Devices, modalities: str, capsys: Any) -> tuple[list[str], dict[str, Any]]:
    """What the command says of the second device, given its configuration and given its policy file, and as JSON."""
    config, texts = config_of(devices, modalities), []
    for node in (config, f"{devices.places[1]}/policy.toml"):
        code, out = checked(devices, node, capsys)
        assert code == 3
        texts.append(" ".join(out.split()))
    said: dict[str, Any] = json.loads(checked(devices, config, capsys, "--json")[1])
    return texts, said
