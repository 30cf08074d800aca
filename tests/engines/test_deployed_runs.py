"""The path of real devices (own folder, own data, own policy, facts from enrolment), without the processes."""

import json
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.devices import RECIPE, Devices
from engines.direct import over
from polyfed.cli import main
from polyfed.core.errors import BadReply, EgressError, RecipeError, TooFewReplies, TransportError
from polyfed.deploy import submit, write_app
from polyfed.deploy.app_folder import app_config
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.configuration import NodeConfig, policy_on
from polyfed.deploy.processes import ServerPorts, free_ports
from polyfed.deploy.server import hosting
from polyfed.deploy.server.queued_run import run_here
from polyfed.deploy.server.server import only_server, serve
from polyfed.engines.protocol import Enrolment
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running.loop import execute
from polyfed.federation.wire.wire_format import Packet
from refusals import refuses


def test_devices_equal_the_simulation_bit_for_bit(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    got = devices.serve(tmp_path / "run")
    one = polyfed.run(devices.recipe, tmp_path / "one", engine="sequential").result
    assert got["state_sha256"] == one["state_sha256"]
    assert got["metrics"]["personal"] == one["metrics"]["personal"], "own test rows"
    assert got["bytes_up"] == one["bytes_up"]
    for k, place in enumerate(devices.places):
        with np.load(place / "data.npz") as arrays:
            assert {"a", "b"} & set(arrays.files) == set([["a", "b"], ["a"], ["b"]][k]), "nothing else is on the device"


def test_a_deployment_is_an_engine_of_its_own_which_polyfed_run_refuses(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    devices.serve(tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.toml").engine.name == "devices"
    assert polyfed.load_run(tmp_path / "run").result["rounds"] == 2
    with refuses(RecipeError, "polyfed submit"):
        polyfed.run(tmp_path / "run" / "recipe.toml")


def test_a_server_started_again_goes_on_with_the_run(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    first = devices.serve(tmp_path / "run")
    assert devices.serve(tmp_path / "run")["state_sha256"] == first["state_sha256"]


@pytest.mark.parametrize(("first", "then"), [("a,b", "a"), ("a", "a,b")])
def test_a_device_that_changed_its_modalities_is_enrolled_anew_when_the_server_starts_again(
    first: str, then: str, tmp_path: Path
) -> None:
    devices = Devices(tmp_path)
    recipe = devices.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + "[engine]\nmin_replies = 3\n")
    devices.configs[0]["modalities"] = first

    def changing(packet: Packet, config: Mapping[str, Any]) -> Packet:
        if packet.header.get("request_id", {}).get("round") == 2:
            devices.configs[0]["modalities"] = then
        return devices(packet, config)

    with refuses(TooFewReplies, "is for modalities"):
        serve(recipe, over(changing, 3), {"out": str(tmp_path / "run")}, execute)
    assert devices.serve(tmp_path / "run")["rounds"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [0 in line["trained"]["b"] for line in lines] == ["b" in first, "b" in then]


def test_a_device_whose_policy_forbids_ends_the_run_in_its_own_words(tmp_path: Path, capsys: Any) -> None:
    devices = Devices(tmp_path)
    (devices.places[1] / "policy.toml").write_text('[egress.a]\nserver = ["statistic"]\n')
    with refuses(EgressError, "take Controlled"):
        devices.serve(tmp_path / "run")
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert told["exit_code"] == 3
    assert "client 1 refused" in capsys.readouterr().err


def test_a_device_that_keeps_statistics_does_not_even_enrol(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    (devices.places[1] / "policy.toml").write_text('[egress.shared]\nserver = ["parameters"]\n')
    with refuses(EgressError, "refused to enrol"):
        devices.serve(tmp_path / "run")


def test_missing_devices_end_the_run_with_exit_code_4(tmp_path: Path) -> None:
    devices = Devices(tmp_path)
    for config in devices.configs:
        config["data"] += ".gone"
    with refuses(TooFewReplies, "0 of 3"):
        devices.serve(tmp_path / "run")


def test_a_clients_policy_can_only_be_made_stricter(tmp_path: Path) -> None:
    recipe = load_recipe(Devices(tmp_path).recipe)
    own = tmp_path / "own.toml"
    own.write_text('[egress.a]\nserver = ["parameters", "embeddings"]\n')
    node = NodeConfig(data="x.npz", client=0, modalities="a", policy=str(own))
    policy = policy_on(node, recipe, ("a", "b"))
    assert policy.allows("parameters", "a", "server")
    assert not policy.allows("embeddings", "a", "server"), "the recipe does not ask for it"
    assert not policy.allows("statistic", "a", "server"), "its own file does not allow it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[egress.labls]\nserver = []\n", "egress.labls: row 'labls'"),
        ("[egres.a]\n", "no section 'egres'"),
        ("x =", "TOML"),
    ],
)
def test_a_wrong_policy_file_is_refused_and_named(text: str, words: str, tmp_path: Path) -> None:
    recipe = load_recipe(Devices(tmp_path).recipe)
    own = tmp_path / "own.toml"
    own.write_text(text)
    with refuses(RecipeError, words) as caught:
        policy_on(NodeConfig(data="x.npz", client=0, modalities="a", policy=str(own)), recipe, ("a", "b"))
    assert "own.toml" in str(caught.value)


def test_an_enrolment_is_not_believed() -> None:
    told = Enrolment(0, 10, ("a",), None, False, {"a": (3,)}, 2)
    assert Enrolment.read(json.loads(json.dumps(told.header()))) == told
    for lie in ({"client": 10**12}, {"rows": -1}, {"rows": 2**60}, {"shapes": {}}, {"num_classes": 0}, {"client": "x"}):
        with pytest.raises(BadReply):
            Enrolment.read(told.header() | lie)


def test_an_app_is_a_recipe_and_where_the_run_goes(tmp_path: Path) -> None:
    app = Devices(tmp_path).app
    assert sorted(path.name for path in app.iterdir()) == ["app.toml", "recipe.toml"]
    assert app_config(app) == {"name": "recipe", "out": str(app / "run"), "data": ""}
    (app / "app.toml").write_text("name = 3")
    with refuses(RecipeError, "holds no app"):
        app_config(app)


def test_an_app_does_not_overwrite_another_folder(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with refuses(RecipeError, "not empty"):
        write_app(tmp_path / "recipe.toml", tmp_path)


def test_an_app_does_not_overwrite_that_of_another_recipe(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.toml").write_text(RECIPE)
    app = write_app(tmp_path / "one.toml", tmp_path / "app")
    assert write_app(tmp_path / "one.toml", app) == app, "the same recipe may be written again"
    before = (app / "app.toml").read_bytes()
    with refuses(RecipeError, "app 'one'"):
        write_app(tmp_path / "other.toml", app)
    assert (app / "app.toml").read_bytes() == before


def test_keys_are_for_their_owners_eyes(tmp_path: Path) -> None:
    folder = write_credentials(tmp_path / "keys", 2)
    for name in ("ca.key", "server.key", "node-0.key", "node-1.key"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert (folder / "node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_a_certificate_is_for_the_hosts_that_were_named(tmp_path: Path) -> None:
    from cryptography import x509

    folder = write_credentials(tmp_path / "keys", 0, ["server.example.org", "10.0.0.7"])
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem", "server.key", "server.pem"], (
        "no keys of devices"
    )
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1"]
    write_credentials(folder, 0, ["server.example.org"])
    with refuses(RecipeError, "other.example.org"):
        write_credentials(folder, 0, ["other.example.org"])
    with refuses(RecipeError, "'not a name'"):
        write_credentials(tmp_path / "others", 0, ["not a name"])
    assert not (tmp_path / "others").exists()


def test_the_command_writes_a_certificate_without_keys(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ("app", str(tmp_path / "app"), "--recipe", str(tmp_path / "recipe.toml"))
    for more, wanted in (((), False), (("--host", "server.example.org"), True), (("--keys", "0"), True)):
        with pytest.raises(SystemExit) as stop:
            main((*words, *more))
        assert stop.value.code == 0
        assert (tmp_path / "app-credentials" / "server.pem").exists() == wanted
    assert "polyfed server" in capsys.readouterr().out


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """`test_device_file.py` has the devices."""
    keys = write_credentials(tmp_path / "keys", 0)
    with refuses(RecipeError, "no ca.pem"):
        hosting.server(tmp_path, ServerPorts())
    (taken,) = free_ports(1)
    with socket.create_server(("127.0.0.1", taken)), refuses(RecipeError, f"port {taken}"):
        hosting.server(keys, ServerPorts(port=taken))
    with refuses(RecipeError, "port 2"):
        hosting.server(keys, ServerPorts("127.0.0.1", 1, 2, 2))


def test_a_folder_without_an_app_or_a_server_is_named_and_a_finished_run_is_not_begun_again(
    tmp_path: Path, capsys: Any
) -> None:
    devices = Devices(tmp_path)
    with refuses(TransportError, "no server uses"):
        submit(devices.app, tmp_path / "none", {})
    with refuses(RecipeError, "holds no app"):
        run_here(tmp_path / "none", tmp_path / "credentials", {})
    devices.serve(devices.app / "run")
    assert run_here(devices.app, tmp_path / "credentials", {}) == devices.app / "run"
    assert "nothing to do" in capsys.readouterr().err


def test_a_run_whose_server_stays_away_ends_with_exit_code_6(tmp_path: Path, monkeypatch: Any) -> None:
    devices = Devices(tmp_path)
    transport = devices.transport()
    monkeypatch.setattr("polyfed.engines.queued.GONE_SECONDS", 0.0)
    monkeypatch.setattr(transport.hub.queue, "online", lambda: None)
    with refuses(TransportError, "server is gone"):
        devices.serve(tmp_path / "run", transport)
    told = json.loads((tmp_path / "run" / "error.json").read_text())
    assert (told["error"], told["exit_code"]) == ("TransportError", 6)


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("superlink", "polyfed server DIR"),
        ("supernode", "polyfed device FILE.toml"),
        ("flower-superlink", "polyfed server DIR"),
        ("flower-supernode", "polyfed device FILE.toml"),
        ("flower-run", "polyfed server DIR"),
    ],
)
def test_the_words_of_deployments_on_flower_name_their_successors(word: str, instead: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        main((word, "somewhere", "--port", "1"))
    assert stop.value.code == RecipeError.exit_code
    said = capsys.readouterr().err
    assert f"there is no `polyfed {word}` any more" in said
    assert f"`{instead}`" in said


def test_an_app_whose_replies_are_too_large_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("hidden = [8]", "hidden = [20000]") + "message_megabytes = 1\n")
    with refuses(RecipeError, "allows 1,048,576"):
        write_app(path, tmp_path / "app")
    assert not (tmp_path / "app").exists()
    wide = RECIPE.replace("hidden = [8]", "hidden = [20000]")
    path.write_text(wide)
    write_app(path, tmp_path / "app")


def test_one_server_writes_a_run_at_a_time(tmp_path: Path) -> None:
    with only_server(tmp_path), refuses(RecipeError, "another server"), only_server(tmp_path, seconds=0.0):
        pass
