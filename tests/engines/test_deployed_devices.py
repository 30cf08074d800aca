"""What a device says when something is wrong on it, to itself and to the server; what the server makes of that; what
is found out before anything is started. No processes."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import RECIPE, Devices
from engines.direct import over
from polyfed.cli import main
from polyfed.core.errors import DataError, ModelError, RecipeError, TooFewReplies
from polyfed.deploy import write_app, write_nodes
from polyfed.deploy.app_folder import app_config, placed
from polyfed.deploy.credentials import _authority, _server, write_credentials
from polyfed.deploy.device.configuration import NodeConfig, policy_on
from polyfed.deploy.device.recipe_check import inspect
from polyfed.deploy.server.server import finished, only_server, serve
from polyfed.engines.protocol import hello
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.policy import Policy
from refusals import refuses

HELLO = hello()


def without(devices: Devices, key: str, value: str) -> dict[str, Any]:
    """What is wrong on device 1."""
    devices.configs[1][key] = value
    return devices.configs[1]


WRONG = {
    "its policy file is not valid": ("policy", "/srv/hospital/policy.toml", "/srv/hospital/policy.toml"),
    "its data cannot be used": ("data", "/srv/hospital/patients.npz", "'/srv/hospital/patients.npz' does not exist"),
    "its table [[device]] is not valid": ("dta", "/srv/hospital/x.npz", "did you mean 'data'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_a_device_is_told_there_in_full_and_to_the_server_in_short(
    what: str, tmp_path: Path, capsys: Any
) -> None:
    devices = Devices(tmp_path)
    key, value, words = WRONG[what]
    answer = devices.handler(HELLO, without(devices, key, value))
    assert answer.header == {"verdict": "failed", "reason": f"client 1: {what}; its own log says why"}
    assert words in capsys.readouterr().err


def test_the_servers_tracker_need_not_be_on_a_device(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    before = devices.handler(HELLO, devices.configs[1])
    app = devices.app / "recipe.toml"
    app.write_text(app.read_text() + '\n[tracking]\nname = "only_at_the_server:Board"\n')
    assert devices.handler(HELLO, devices.configs[1]).header == before.header
    with refuses(RecipeError, "tracking.name: only_at_the_server"):
        load_recipe(app)


def test_a_deployment_is_tracked_as_a_simulation_is(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    app = devices.app / "recipe.toml"
    app.write_text(app.read_text() + '\n[tracking]\nname = "tensorboard"\n')
    devices.serve(tmp_path / "out")
    assert list((tmp_path / "out" / "tensorboard").glob("events.out.tfevents.*"))


def test_an_unknown_modality_is_named_on_the_device_only(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    answer = devices.handler(HELLO, without(devices, "modalities", "aa"))
    assert "aa" not in answer.header["reason"]
    assert "the recipe has no 'aa'; did you mean 'a'?" in capsys.readouterr().err


def test_a_fault_during_an_ask_answers_that_ask_and_tells_no_path(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(RECIPE + "[engine]\nmin_replies = 3\n")

    def breaking(packet: Packet, config: Any) -> Packet:
        if packet.header.get("request_id", {}).get("round") == 2:
            devices.configs[1]["data"] = "/srv/hospital/patients.npz"
        return devices(packet, config)

    with refuses(TooFewReplies, "own log") as caught:
        serve(recipe, over(breaking, 3), {"out": str(tmp_path / "run")}, execute)
    assert "hospital" not in str(caught.value)
    assert "hospital" in capsys.readouterr().err


def test_a_crash_of_the_users_own_kind_is_traced_on_the_device_only(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    devices = Devices(tmp_path)

    def crash(*_: Any) -> None:
        raise KeyError("/srv/hospital/secret")

    monkeypatch.setattr("polyfed.deploy.handlers.population_on", crash)
    answer = devices.handler(HELLO, devices.configs[1])
    assert answer.header["reason"] == "client 1: its data cannot be used; its own log says why"
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "KeyError: '/srv/hospital/secret'" in err


def test_a_run_begins_with_all_devices_unless_the_recipe_says_otherwise(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    (devices.places[1] / "policy.toml").write_text("x =")
    with refuses(TooFewReplies, "policy file") as caught:
        devices.serve(tmp_path / "run")
    assert caught.value.exit_code == 4
    (devices.app / "recipe.toml").write_text(RECIPE + "min_nodes = 2\n")
    devices.serve(tmp_path / "run")
    out = capsys.readouterr().err
    assert "waiting: 2 of 3 enrolled" in out
    assert "WARNING polyfed: starting with 2 of 3 clients. Not enrolled: client 1: its policy file is not valid" in out
    assert "note: text" not in out


def test_what_ended_a_run_is_gone_when_it_goes_on(tmp_path: Path) -> None:
    devices, error = Devices(tmp_path), tmp_path / "run" / "error.json"
    policy = devices.places[1] / "policy.toml"
    whole = policy.read_text()
    policy.write_text("x =")
    with pytest.raises(TooFewReplies):
        devices.serve(tmp_path / "run")
    assert json.loads(error.read_text())["exit_code"] == 4
    policy.write_text(whole)
    devices.serve(tmp_path / "run")
    assert not error.exists()


def test_one_policy_file_serves_devices_of_different_modalities(tmp_path: Path) -> None:
    recipe = load_recipe(Devices(tmp_path).recipe)
    everywhere = tmp_path / "everywhere.toml"
    everywhere.write_text('[egress.a]\nserver = ["statistic"]\n[egress.b]\nserver = []\n')
    for held in ("a", "b"):
        node = NodeConfig(data="x.npz", client=0, modalities=held, policy=str(everywhere))
        assert not policy_on(node, recipe, (held,)).allows("parameters", "b", "server")


def test_the_state_of_a_device_lies_next_to_its_data_also_below_the_home_folder(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Otherwise the folder would depend on the current folder, and with it the privacy budget."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for current in (tmp_path, Path("/")):
        monkeypatch.chdir(current)
        assert NodeConfig(data="~/d/x.npz", client=0, modalities="a").folder == tmp_path / "d" / "polyfed-state"
        assert NodeConfig(data="/x.npz", client=0, modalities="a", state="~/s").folder == tmp_path / "s"


def test_one_request_sees_one_policy_although_the_owner_replaces_the_file_meanwhile(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The old policy lets everything leave with noise, and the new one lets nothing leave without noise."""
    devices = Devices(tmp_path)
    policy = devices.places[1] / "policy.toml"
    old = policy.read_text() + "[require]\nmax_epsilon = 1.0\ndelta = 1e-3\n"
    new = '[egress.a]\nserver = []\n[egress.shared]\nserver = ["statistic"]\n'
    policy.write_text(old)
    reads, parse = [0], Policy.parse

    def replacing(*args: Any, **options: Any) -> Any:
        made = parse(*args, **options)
        if "policy.toml" in str(args[-1]):
            reads[0] += 1
            policy.write_text(new)
        return made

    monkeypatch.setattr(Policy, "parse", replacing)
    answer = devices(HELLO, {"partition-id": 1})
    assert reads[0] == 1
    assert policy.read_text() == new
    assert answer.header["verdict"] == "refused"
    assert "[require] max_epsilon = 1 of the device" in answer.header["reason"], "the demand of the old policy"


def test_who_holds_a_run_is_named(tmp_path: Path) -> None:
    with only_server(tmp_path), refuses(RecipeError, f"process {os.getpid()}"):
        only_server(tmp_path, seconds=0.0).__enter__()


OWN_DATA = RECIPE.replace(
    'name = "toy"\nrows = 240\nclasses = 4', 'name = "npz"\npath = "rows.npz"\nmodalities = ["a"]'
)
OWN_DATA = OWN_DATA.replace('holdings = [["a", "b"], ["a"], ["b"]]\n', "").replace(
    'b = { kind = "mlp", hidden = [8] }\n', ""
)


def test_the_servers_own_rows_are_found_from_any_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("rows.npz", a=rng.normal(size=(60, 5)).astype("float32"), label=np.arange(60) % 4)
    Path("recipe.toml").write_text(OWN_DATA)
    warned: list[str] = []
    app = write_app("recipe.toml", "app", warned.append)
    config = app_config(app)
    assert config["data"] == str(tmp_path / "rows.npz")
    assert not warned
    monkeypatch.chdir("/")
    assert len(placed(load_recipe(tmp_path / "app" / "recipe.toml"), config["data"]).data.load()) == 60
    monkeypatch.chdir(tmp_path)
    Path("rows.npz").unlink()
    write_app("recipe.toml", "app", warned.append)
    assert "no global evaluation" in warned[0]
    assert "rows.npz" in warned[0]


def test_an_app_whose_model_cannot_be_built_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace('b = { kind = "mlp", hidden = [8] }', 'b = { kind = "nowhere.at_all:Net" }'))
    with refuses(RecipeError, "nowhere"):
        write_app(path, tmp_path / "app")
    path.write_text(RECIPE.replace('b = { kind = "mlp", hidden = [8] }\n', ""))
    with refuses(ModelError, "model.encoders.b: modality 'b'"):
        write_app(path, tmp_path / "app")
    assert not (tmp_path / "app").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('unit = "client"\namplification = true', "every request holds the seed"),
        ('unit = "client"', "weights by rows give some clients more influence"),
        ('unit = "example"', "[train] steps"),
    ],
)
def test_an_app_whose_privacy_cannot_be_honoured_is_not_written(tmp_path: Path, options: str, words: str) -> None:
    path = tmp_path / "recipe.toml"
    changed = RECIPE.replace('"scaffold"', '"fedavg"').replace("lr = 0.1", "lr = 0.1\nsteps = 5")
    if "amplification" in options:
        changed = changed.replace('"fedavg"', '"fedavg"\naggregation = "uniform"')
    path.write_text(f"{changed}\n[privacy]\nepsilon = 8.0\ndelta = 0.001\n{options}\n")
    with pytest.raises(RecipeError) as refused:
        write_app(path, tmp_path / "app")
    assert words in str(refused.value)
    path.write_text(f'{RECIPE}\n[attack]\nname = "sign-flip"\nshare = 0.34\n')
    with refuses(RecipeError, "attack: only a simulation"):
        write_app(path, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_credentials_in_use_are_kept_and_only_missing_keys_added(tmp_path: Path) -> None:
    folder = write_credentials(tmp_path / "keys", 2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_credentials(folder, 3)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"node-2.key", "node-2.pub"}


def test_credentials_that_cannot_be_used_are_refused_with_a_cure(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    with refuses(RecipeError, "-1 node keys"):
        write_credentials(tmp_path / "keys", -1)
    folder = write_credentials(tmp_path / "keys", 0)
    authority, ca = _authority()
    (folder / "server.pem").write_bytes(_server(authority, ca, ["localhost"], days=-2)[1].public_bytes(Encoding.PEM))
    with refuses(RecipeError, "expired on"):
        write_credentials(folder, 0)
    (folder / "server.pem").unlink()
    with refuses(RecipeError, "no server.pem"):
        write_credentials(folder, 0)


def test_the_command_says_what_it_kept(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("app", str(tmp_path / "app"), "--recipe", str(tmp_path / "recipe.toml"), "--keys")
    for number in ("1", "2", "-1"):
        with pytest.raises(SystemExit) as stop:
            main((*words, number))
    assert stop.value.code == 2
    out = capsys.readouterr().out
    assert "are kept; new: node-1.key, node-1.pub" in out


def test_an_app_without_credentials_is_not_said_to_have_some(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("app", str(tmp_path / "app"), "--recipe", str(tmp_path / "recipe.toml"))

    def said(*more: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main((*words, *more))
        assert not stop.value.code
        return " ".join(capsys.readouterr().out.split())

    first = said()
    assert not (tmp_path / "app-credentials").exists()
    assert "no credentials were asked for" in first
    assert "repeat the command with --host NAME" in first
    assert json.loads(said("--json"))["credentials"] is None
    assert "a server certificate" in said("--host", "server.example.org")
    again = said()
    assert "no credentials" not in again
    assert "are unchanged" in again


def test_a_policy_that_is_on_a_device_is_not_written_over(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    policy = devices.places[0] / "policy.toml"
    policy.write_text("# mine\n")
    write_nodes(load_recipe(devices.recipe), tmp_path)
    assert policy.read_text() == "# mine\n"


def test_a_device_is_checked_before_it_starts(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    place = devices.places[1]
    (place / "policy.toml").write_text('[egress.a]\nserver = ["statistic"]\n')
    config = f'data="{place}/data.npz" client=1 modalities="a" policy="{place}/policy.toml"'
    found = inspect(load_recipe(devices.recipe), config)
    assert found.rows is not None
    assert found.rows[0] > 0
    assert found.shapes.keys() == {"a"}
    update = "ControlledUpdate"
    assert {(row.message, row.block) for row in found.refused} == {(update, "a"), (update, "shared")}
    with pytest.raises(SystemExit) as stop:
        main(("check", str(devices.recipe), "--node", config))
    assert stop.value.code == 3
    assert 'would be allowed by [egress.a] server = ["parameters", "gradients", "statistic"]' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(("check", str(devices.recipe), "--node", config, "--json"))
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == found.rows[0]
    assert facts["egress"]["a"]["server"] == ["statistic"]


def test_a_policy_file_is_checked_alone(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    recipe, own = load_recipe(devices.recipe), tmp_path / "own.toml"
    own.write_text("[egress.b]\nserver = []\n")
    assert {row.block for row in inspect(recipe, str(own)).refused} == {"b", "shared"}, "its layers read `b`"
    own.write_text("[egress.bb]\nserver = []\n")
    with refuses(RecipeError, "egress.bb: row 'bb'"):
        inspect(recipe, str(own))
    with refuses(RecipeError, "nor a policy"):
        inspect(recipe, "nowhere.toml")


def test_a_check_that_cannot_know_what_the_recipe_sends_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RECIPE.replace('name = "toy"\nrows = 240\nclasses = 4', 'name = "npz"\npath = "/nowhere.npz"')
    (tmp_path / "recipe.toml").write_text(text)
    own = tmp_path / "own.toml"
    own.write_text("[egress.a]\nserver = []\n[egress.b]\nserver = []\n")
    for more in ((), ("--json",)):
        with pytest.raises(SystemExit) as stop:
            main(("check", str(tmp_path / "recipe.toml"), "--node", str(own), *more))
        assert stop.value.code == 5
    said = " ".join(capsys.readouterr().out.split())
    assert "NOT CHECKED: what the recipe would send, because the recipe's data cannot be read here" in said
    assert "'/nowhere.npz' does not exist" in said
    assert "Give the device's data: --node 'data=" in said


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('data="/nowhere.npz" client=0 modalities="a"', "'/nowhere.npz' does not exist"),
        ('data="x.npz" client=0 modalities="aa"', "did you mean 'a'"),
        ('data="x.npz" client=-1 modalities="a"', "numbered from 0"),
        ("data=x.npz client=0", "Values are TOML"),
        ('data="x.npz" client=0 modalities="a" now', "'now' is no key=value"),
    ],
)
def test_a_wrong_device_is_told_so_before_it_starts(config: str, words: str, tmp_path: Path) -> None:
    recipe = load_recipe(Devices(tmp_path).recipe)
    with pytest.raises((RecipeError, DataError)) as caught:
        inspect(recipe, config)
    assert words in str(caught.value)


def test_a_run_is_finished_when_its_recipe_has_a_result(tmp_path: Path) -> None:
    devices, out = Devices(tmp_path), tmp_path / "run"
    recipe = load_recipe(devices.recipe)
    assert not finished(recipe, out)
    devices.serve(out)
    assert finished(recipe, out)
    (tmp_path / "more.toml").write_text(RECIPE.replace("rounds = 2", "rounds = 3"))
    assert not finished(load_recipe(tmp_path / "more.toml"), out)
    (tmp_path / "other.toml").write_text(RECIPE.replace("lr = 0.1", "lr = 0.2"))
    assert not finished(load_recipe(tmp_path / "other.toml"), out)
