"""The manifests in deploy/kubernetes are valid, give no rights, and start what compose.yml and the page say."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from house.test_deploy_files import DEPLOY, check_command, commands_of, compose, replaced

jsonschema: Any = pytest.importorskip("jsonschema")

ROLES = ("server", "edge", "device")
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
"""Kinds of volumes without access to the node."""


def manifests(role: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((DEPLOY / "kubernetes" / f"{role}.yml").read_text())]


def of_kind(role: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in manifests(role) if one["kind"] == kind]
    return found


def workload(role: str) -> dict[str, Any]:
    return of_kind(role, "Deployment" if role == "device" else "StatefulSet")


def pod(role: str) -> dict[str, Any]:
    found: dict[str, Any] = workload(role)["spec"]["template"]["spec"]
    return found


def main_container(role: str) -> dict[str, Any]:
    (found,) = pod(role)["containers"]
    assert found["name"] == role
    return dict(found)


def faults(manifest: dict[str, Any]) -> list[str]:
    """What Kubernetes would refuse; kubernetes.json says where its schema is from."""
    schema = json.loads(Path(__file__).with_name("kubernetes.json").read_text())
    told = jsonschema.Draft202012Validator(schema | {"$ref": f"#/$defs/{manifest['kind']}"}).iter_errors(manifest)
    return [f"{'.'.join(map(str, one.path))}: {one.message}" for one in told]


@pytest.mark.parametrize("role", ROLES)
def test_kubernetes_takes_the_manifests(role: str) -> None:
    for manifest in manifests(role):
        assert faults(manifest) == []
        assert manifest["metadata"]["name"].startswith("polyfed-")


def test_a_typing_error_in_a_manifest_is_noticed() -> None:
    for change, word in (
        (lambda one: one["livenessProbe"].update(periodSecond=5), "periodSecond"),
        (lambda one: one["ports"][0].update(containerPort="9092"), "9092"),
        (lambda one: one["securityContext"].update(readOnlyRootFileSystem=True), "readOnlyRootFileSystem"),
        (lambda one: one.pop("name"), "name"),
    ):
        broken = copy.deepcopy(workload("server"))
        change(broken["spec"]["template"]["spec"]["containers"][0])
        assert word in str(faults(broken))


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_no_rights_and_writes_only_its_volume(role: str) -> None:
    """What the pod security standard `restricted` asks for, and a root file system that is read-only."""
    spec = pod(role)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {spec["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {10001}
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec)
    kinds = {volume["name"]: (set(volume) - {"name"}).pop() for volume in spec["volumes"]}
    assert set(kinds.values()) <= VOLUMES
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"] == "4Gi"
        assert replaced(compose()["services"][role]["mem_limit"]) == "4g"
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/var/lib/polyfed", "/tmp"}
        claims = {volume["metadata"]["name"] for volume in workload(role)["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} <= {*kinds, *claims}


def test_one_process_has_the_key_and_the_volume_of_a_role() -> None:
    assert [workload(role)["spec"]["replicas"] for role in ROLES] == [1, 1, 1]
    assert workload("device")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("role", ROLES)
def test_a_container_starts_what_compose_starts(role: str) -> None:
    container, service = main_container(role), compose()["services"][role]
    given = check_command(container["args"])
    assert given == check_command([replaced(word) for word in service["command"]])
    assert container["image"] == service["image"]
    assert f"{pod(role)['terminationGracePeriodSeconds']}s" == service["stop_grace_period"]
    ready = container["readinessProbe"]["exec"]["command"]
    assert ready == service["healthcheck"]["test"][1:]
    assert f"127.0.0.1:{given['--metrics-port']}/health" in ready[-1]
    assert [one["name"] for one in container["env"]] == ["OMP_NUM_THREADS"]


def test_the_services_and_the_policies_open_the_ports_of_compose() -> None:
    for role in ("server", "edge"):
        ports = main_container(role)["ports"]
        opened = [f"{one['containerPort']}:{one['containerPort']}" for one in ports]
        assert opened == compose()["services"][role]["ports"]
        service = of_kind(role, "Service")["spec"]
        assert [(one["targetPort"], one["port"]) for one in service["ports"]] == [
            (one["name"], one["containerPort"]) for one in ports
        ]
        assert service["selector"] == workload(role)["spec"]["template"]["metadata"]["labels"]
        (ingress,) = of_kind(role, "NetworkPolicy")["spec"]["ingress"]
        assert [one["port"] for one in ingress["ports"]] == [one["containerPort"] for one in ports]
    assert of_kind("server", "NetworkPolicy")["spec"]["egress"] == []
    assert of_kind("edge", "NetworkPolicy")["spec"]["egress"] == of_kind("device", "NetworkPolicy")["spec"]["egress"]
    assert of_kind("device", "NetworkPolicy")["spec"]["ingress"] == []
    assert "ports" not in main_container("device")
    for role in ROLES:
        labels = workload(role)["spec"]["template"]["metadata"]["labels"]
        assert of_kind(role, "NetworkPolicy")["spec"]["podSelector"] == {"matchLabels": labels}
        assert workload(role)["spec"]["selector"] == {"matchLabels": labels}


def test_the_page_makes_what_the_manifests_mount() -> None:
    """Each ConfigMap and Secret, with the file that a container reads in its mount, and each pod and manifest."""
    made = {}
    for words in commands_of("Kubernetes"):
        if words[:2] == ["kubectl", "create"]:
            kind, name, source = (word for word in words[2:] if word != "generic")
            made[name] = (kind, source.removeprefix("--from-file="))
        elif words[1] == "apply":
            assert (DEPLOY.parent / words[-1]).is_file()
        else:
            assert words[:2] == ["kubectl", "exec"]
            assert words[2] in [f"{workload(role)['metadata']['name']}-0" for role in ("server", "edge")]
            if words[3:5] != ["--", "cat"]:
                check_command(words[5:])
    wanted = {}
    for role in ROLES:
        containers = (*pod(role)["initContainers"], *pod(role)["containers"])
        read = "\n".join([*(str(one) for one in containers), *(" ".join(words) for words in commands_of("Kubernetes"))])
        mounts = {mount["name"]: mount["mountPath"] for one in containers for mount in one["volumeMounts"]}
        for volume in pod(role)["volumes"]:
            for kind, key in (("configMap", "name"), ("secret", "secretName")):
                if kind in volume:
                    (file,) = set(re.findall(rf"{re.escape(mounts[volume['name']])}/([\w.]+)", read))
                    wanted[volume[kind][key]] = (kind.lower(), file)
    assert made == wanted
