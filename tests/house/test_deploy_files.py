"""The image, the compose file and the systemd units in deploy/ keep what docs/operations.md promises of them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import typer
import yaml

from polyfed.cli import app
from polyfed.cli.federation import START

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SERVICES = ("server", "edge", "device")
RECIPE = """
[data]
name = "toy"
[clients]
num = 2
[model.encoders]
a = { kind = "mlp", hidden = [4] }
b = { kind = "mlp", hidden = [4] }
[algorithm]
name = "fedavg"
"""

HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "ProtectControlGroups": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "CapabilityBoundingSet": "",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "@system-service",
    "StateDirectory": "polyfed",
    "StateDirectoryMode": "0700",
    "UMask": "0077",
    "User": "polyfed",
    "KillMode": "mixed",
}
"""Settings that all units have."""


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with lines that go on joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)
    ]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    return found[max(number for number, (word, _) in enumerate(found) if word == "FROM") :]


def options_of(command: str) -> set[str]:
    """The options of a verb of polyfed."""
    verb = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    verb = getattr(verb, "commands", {}).get(START, verb)
    return {name for parameter in verb.params for name in parameter.opts}


def check_command(words: list[str]) -> dict[str, str]:
    """A command line of polyfed has options that exist; return their values."""
    given = re.findall(r"^(--[\w-]+)", "\n".join(words), re.MULTILINE)
    assert set(given) <= options_of(words[0]), f"{words[0]} lacks {set(given) - options_of(words[0])}"
    joined = [word for part in words[1:] for word in (part.split("=", 1) if part.startswith("--") else [part])]
    return {joined[n]: joined[n + 1] for n, word in enumerate(joined[:-1]) if word.startswith("--")}


def test_the_image_runs_as_a_user_without_rights() -> None:
    stage = dict(last_stage())
    assert stage["USER"] == "10001:10001"
    assert stage["ENTRYPOINT"] == '["polyfed"]'
    assert stage["VOLUME"] == "/var/lib/polyfed"
    assert not [text for word, text in last_stage() if word == "RUN" and "pip" in text], "nothing is installed here"


def test_the_image_has_the_pytorch_of_the_constraints_for_cpus() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (install,) = [text for word, text in instructions() if word == "RUN" and "pip install" in text]
    assert set(re.findall(r"torch==([\w.+]+)", install)) == {f"{pinned}+cpu"}
    assert "--index-url https://download.pytorch.org/whl/cpu torch==" in install
    assert "--constraint pinned.txt '.[server,secure,privacy]'" in install, "everything else is pinned too"


def test_the_image_and_the_service_can_run_recipes_with_privacy_and_secure_aggregation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (install,) = [text for word, text in instructions() if word == "RUN" and "pip install" in text]
    pages = (install, (ROOT / "docs" / "operations.md").read_text())
    for page in pages:
        (named,) = re.findall(r"'(?:\.|polyfed)\[([\w,]+)\]'", page)
        assert {"server", "secure", "privacy"} == set(named.split(",")) <= set(extras)


WITHOUT_FLOWER = """
import sys
sys.modules["ray"] = sys.modules["flwr"] = None  # importing them fails
import polyfed.deploy.device.agent, polyfed.deploy.device.tasks, polyfed.deploy.device.device_file
import polyfed.deploy.server.hosting, polyfed.deploy.server.queued_run, polyfed.deploy.local_federation
from polyfed.cli import main
"""


def test_a_server_and_a_device_need_neither_flower_nor_ray() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("server", "device"):
        assert not [word for word in extras[extra] if word.startswith(("flwr", "ray"))]
    assert set(extras["device"]) < set(extras["server"]), "the image and app --local have both"
    subprocess.run([sys.executable, "-c", WITHOUT_FLOWER], check=True)


def test_the_image_holds_nothing_of_the_checkout_but_the_package() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert (ROOT / ".dockerignore").read_text().startswith("*\n")
    copied = [text.split()[:-1] for word, text in instructions() if word == "COPY" and "--from" not in text]
    assert {name for names in copied for name in names} == allowed
    assert all((ROOT / name).exists() for name in allowed)
    assert all(":" in text.split()[0] for word, text in instructions() if word == "FROM"), "no image without a version"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return loaded


def replaced(text: str) -> str:
    """A value with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_has_no_rights_and_cannot_write_its_files(name: str) -> None:
    service = compose()["services"][name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "network_mode", "pid", "ipc"} & set(service)
    assert service["restart"] == "unless-stopped"
    assert replaced(service["mem_limit"]) == "4g"
    writable = [volume.split(":") for volume in map(replaced, service["volumes"]) if not volume.endswith(":ro")]
    assert writable == [[name, "/var/lib/polyfed"]]
    assert not [volume for volume in service["volumes"] if "docker.sock" in volume]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_starts_a_command_that_exists(name: str) -> None:
    service = compose()["services"][name]
    given = check_command([replaced(word) for word in service["command"]])
    assert f"127.0.0.1:{given['--metrics-port']}/health" in service["healthcheck"]["test"][-1]
    if name == "device":
        assert "/etc/polyfed/device.toml" in service["command"]
        assert [volume for volume in map(replaced, service["volumes"]) if volume == "/etc/polyfed:/etc/polyfed:ro"]


def commands_of(heading: str) -> list[list[str]]:
    """The words of the commands under a heading of docs/operations.md."""
    page = (ROOT / "docs" / "operations.md").read_text()
    part = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    return [words for block in blocks for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def test_the_containers_commands_make_a_server_an_edge_and_a_device_that_starts(tmp_path: Path, capsys: Any) -> None:
    """They run here without containers: the paths inside of these are folders of the test, as the mounts say."""
    pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")
    import numpy as np

    from polyfed.cli import main
    from polyfed.deploy.device.device_file import device_file
    from polyfed.deploy.edge.edge_file import edge_file
    from polyfed.deploy.processes import free_ports
    from polyfed.transport.hub import HubServer

    places = {"/var/lib/polyfed": "volume", "/recipes": "recipes", "/data": "data", "/join": "config"}
    for name in places.values():
        (tmp_path / name).mkdir()
    (tmp_path / "recipes" / "recipe.toml").write_text(RECIPE)
    values = np.zeros((12, 3), dtype=np.float32)
    np.savez(tmp_path / "data" / "mine.npz", a=values, label=np.arange(12) % 2)

    def runs(words: list[str]) -> str:
        for inside, outside in places.items():
            words = [re.sub(rf"^{inside}(?=/|$)", str(tmp_path / outside), word) for word in words]
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code, words
        return str(capsys.readouterr().out)

    run = [words[4:] for words in commands_of("Containers") if words[:4] == ["docker", "compose", "run", "--rm"]]
    assert all(words[-2] == "up" for words in commands_of("Containers") if "--profile" in words)
    (write, start), (edge,), ((option, volume, service, *join),) = (
        [words[1:] for words in run if words[0] == "server"],
        [words[1:] for words in run if words[0] == "edge"],
        [words for words in run if words[0] not in ("server", "edge")],
    )
    assert option == "--volume"
    assert (volume, service) == ("/etc/polyfed:/join", "device")
    assert f"{volume.partition(':')[0]}:/etc/polyfed:ro" in [
        replaced(one) for one in compose()["services"]["device"]["volumes"]
    ]
    runs(write)
    start = [
        *(word.replace("server.example.org", "127.0.0.1") for word in start),
        "--port",
        str(port := free_ports(1)[0]),
    ]
    token, other = re.findall(r"polyfed-join-\S+", runs(start))
    server = HubServer(tmp_path / "volume" / "app-credentials", "127.0.0.1", port)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        runs([token if word == "TOKEN" else word for word in join] + ["--yes"])
        runs([other if word == "TOKEN" else word for word in edge])
    finally:
        server.server.should_exit = True
        thread.join(20)
    (tmp_path / "config").rename(tmp_path / "etc")
    (device,) = device_file(tmp_path / "etc" / "device.toml")["devices"]
    assert Path(device["key"]).parent == tmp_path / "etc", "it works under another path"
    assert Path(device["config"]["state"]) == tmp_path / "volume" / "state", "the data are mounted read-only"
    assert edge_file(tmp_path / "volume" / "edge" / "edge.toml")["hub"]["port"] == 9093, "which the service publishes"


def test_server_and_edge_publish_their_public_ports_and_a_device_none() -> None:
    services = compose()["services"]
    assert services["server"]["ports"] == ["9092:9092", "9096:9096"]
    assert services["edge"]["ports"] == ["9093:9093"]
    assert "ports" not in services["device"]


def unit(path: Path) -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def test_there_is_a_unit_for_the_server_an_edge_and_a_device() -> None:
    assert [path.stem for path in UNITS] == ["polyfed-device", "polyfed-edge", "polyfed-server"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_is_hardened(path: Path) -> None:
    service = dict(unit(path)["Service"])
    assert {name: service.get(name) for name in HARDENED} == HARDENED
    assert unit(path)["Install"]["WantedBy"] == "multi-user.target"
    words = shlex.split(service["ExecStart"])
    assert words[0] == "/opt/polyfed/bin/polyfed"
    assert service["MemoryMax"]
    given = check_command(words[1:])
    assert (service["Restart"], given["--metrics-port"]) == ("always", "9095")
    if "edge" in path.stem:
        joined = next(words for words in commands_of("Services: systemd") if "join" in words)
        assert words[2] == f"{joined[joined.index('TOKEN') + 1]}/edge.toml", "where the page lets it join"
    if "device" in path.stem:
        assert words[1:3] == ["device", "/etc/polyfed/device.toml"]
        assert service["LoadCredential"] == "node.key:/etc/polyfed/node.key"
        page = (ROOT / "docs" / "operations.md").read_text()
        assert 'key = "/run/credentials/polyfed-device.service/node.key"' in page, "where systemd puts it"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    """The program is replaced by one that exists on this machine."""
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("/opt/polyfed/bin/polyfed", str(Path(sys.executable).resolve())))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(copy)]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0, "exposure above 2.5"


def exposition() -> str:
    """All metrics of a server with jobs in all states, and of a device with tasks of all verdicts."""
    pytest.importorskip("prometheus_client", reason="the extra polyfed[server] is not installed")
    from prometheus_client import generate_latest

    from polyfed.deploy.device.monitor import UNKNOWN, DeviceMonitor
    from polyfed.deploy.server.jobs import STATES
    from polyfed.deploy.server.monitor import JOB_COUNTS, JOB_NUMBERS, metrics_of
    from polyfed.engines.protocol import ENROLLED, FAILED, REFUSED, REPLY

    numbers = dict.fromkeys((*JOB_NUMBERS, *JOB_COUNTS, "changed"), 1.0)
    jobs = [{"id": number, "state": state, **numbers} for number, state in enumerate(STATES)]
    link = {"nodes": {"registered": 3, "online": 2}, "certificate_ends": 2e9, "jobs": jobs}
    link |= {"job_states": dict.fromkeys(STATES, 1), "runs": [{"id": "7", "state": "running", "progress": {}}]}
    device = DeviceMonitor(0, os.memfd_create("contact"))
    with device.socket:
        for verdict in (ENROLLED, REPLY, REFUSED, FAILED, UNKNOWN):
            device.done({"verdict": verdict})
    return metrics_of(link).decode() + generate_latest(device.registry).decode()


def test_every_series_of_the_dashboard_and_the_alerts_exists() -> None:
    """Metric, labels and values of each selector are those of a sample; each label of a text is one of its series."""
    from prometheus_client.parser import text_string_to_metric_families

    known: dict[str, list[dict[str, str]]] = {"up": [{"job": "polyfed"}]}
    for family in text_string_to_metric_families(exposition()):
        for sample in family.samples:
            known.setdefault(sample.name, []).append({"instance": "", "job": "polyfed"} | sample.labels)
    for where, expression, text in [*alerts(), *panels()]:
        assert expression.count("(") == expression.count(")"), where
        selectors = re.findall(r"\b(up|polyfed_\w+)(?:\{([^}]*)\})?", expression)
        assert selectors, where
        told = {"instance"}
        for name, matchers in selectors:
            wanted = re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers)
            fit = [
                labels
                for labels in known.get(name, [])
                if all(value == "$server" or re.fullmatch(value, labels.get(label, "-")) for label, _, value in wanted)
            ]
            assert fit, f"{where}: there is no {name}{{{matchers}}}"
            told |= {label for labels in fit for label in labels}
        assert set(re.findall(r"(?:\$labels\.|\{\{)(\w+)\}?", text.replace(" ", ""))) <= told, where


def alerts() -> list[tuple[str, str, str]]:
    """The rules: name, expression and text."""
    found = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
    ]
    for rule in found:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1h"))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert len({rule["alert"] for rule in found}) == len(found)
    return [(rule["alert"], rule["expr"], rule["annotations"]["summary"]) for rule in found]


def panels() -> list[tuple[str, str, str]]:
    """The queries of the dashboard: title, expression and legend."""
    made = json.loads((MONITORING / "dashboard.json").read_text())
    names = {variable["name"] for variable in made["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(made["panels"]))) == names == {"datasource", "server"}
    found = made["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in found)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "no panel covers another"
    assert max(x for x, _ in cells) < 24
    queries = [
        (panel["title"], target["expr"], target["legendFormat"]) for panel in found for target in panel["targets"]
    ]
    return [*queries, ("server", made["templating"]["list"][1]["query"].partition("(")[2].partition(",")[0], "")]


def daemon() -> bool:
    """Whether images can be built here."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not daemon(), reason="no Docker daemon is here")
def test_the_image_builds_and_runs() -> None:
    tag = f"polyfed-test:{os.getpid()}"
    words = ["docker", "build", "--quiet", "--file", str(DEPLOY / "Dockerfile"), "--tag", tag, str(ROOT)]
    subprocess.run(words, check=True)
    hardened = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--tmpfs=/tmp"]
    run = ["docker", "run", "--rm", *hardened, tag, "server", "--help"]
    assert "--status-port" in subprocess.run(run, capture_output=True, text=True, check=True).stdout
    subprocess.run(["docker", "image", "rm", tag], check=True)
