"""Traces of OpenTelemetry: spans of a run and its devices, what they may tell, and that nothing is loaded without."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyfed
from engines.devices import RECIPE
from polyfed.core.system import tracing
from polyfed.core.system.tracing import ALLOWED, here, span
from refusals import refuses, warned
from world import algorithm, recipe

VARIABLES = (*tracing.ASKED, "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
CANARY = "heron-4711"


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the machine counts, and each test has its own provider."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tracing, "_providers", {})
    yield
    for provider in filter(None, tracing._providers.values()):
        provider.shutdown()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Traces are on, and stay in memory. Call it for what has come."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra polyfed[otel] is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setattr(tracing, "_exporter", lambda: kept)

    def come() -> list[Any]:
        tracing.flush()
        return list(kept.get_finished_spans())

    return come


def parent_of(one: Any, among: list[Any]) -> Any:
    (found,) = [other for other in among if one.parent is not None and other.context.span_id == one.parent.span_id]
    return found


def test_a_run_has_spans_for_rounds_requests_aggregation_and_evaluation(spans: Any) -> None:
    polyfed.run(recipe(algorithm("fedavg"), rounds=2))
    among = spans()
    names = [one.name for one in among]
    assert names.count("run") == 1
    assert names.count("round") == 2
    assert {"request", "aggregate", "evaluate"} <= set(names)
    assert len({one.context.trace_id for one in among}) == 1, "one trace"
    for one in among:
        if one.name in ("request", "aggregate", "evaluate"):
            assert parent_of(one, among).name in ("round", "evaluate", "run")
    (first, second) = [one for one in among if one.name == "round"]
    assert dict(first.attributes) == {"round": 1}
    assert parent_of(second, among).name == "run"


def test_a_devices_span_hangs_under_the_servers_request(spans: Any, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")
    from engines.own_devices import own_devices

    text = RECIPE.replace("rounds = 2", "rounds = 1").replace("enrol_seconds = 2.0", "enrol_seconds = 60.0")
    with own_devices(tmp_path, text) as made:
        made.run()
    among = spans()
    ours = [one for one in among if one.name == "device" and one.attributes["verdict"] == "reply"]
    under = [parent_of(one, among) for one in ours]
    assert {one.name for one in under} == {"request"}
    assert "update" in {one.attributes["task"] for one in under}
    assert len(ours) >= 3, "one for each device"
    state = json.loads((made.app / "run" / "result.json").read_text())["state_sha256"]
    assert state == polyfed.run(made.recipe, tmp_path / "one", engine="sequential").result["state_sha256"]


def test_no_data_label_id_or_text_of_an_error_is_in_a_span(spans: Any, tmp_path: Path) -> None:
    """Columns, classes, clients and paths have names that must not be in any span, and a method fails with one."""
    table = tmp_path / CANARY / "rows.csv"
    table.parent.mkdir()
    rows = [f"{CANARY}-who-{n % 3},{n % 7}.25,{n % 5}.5,{CANARY}-class-{n % 2}" for n in range(60)]
    table.write_text("\n".join([f"person,{CANARY}-x,{CANARY}-y,label", *rows]))
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'rounds = 1\n[data]\nname = "table"\npath = "{table}"\nlabel = "label"\nclient = "person"\n'
        f'standardise = false\nmodalities = {{ a = ["{CANARY}-x"], b = ["{CANARY}-y"] }}\n'
        '[clients]\npartition = "by-client"\n[model.encoders]\na = { kind = "mlp" }\nb = { kind = "mlp" }\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    polyfed.run(path, tmp_path / "run")
    with refuses(ValueError, CANARY), span("request", task="update"):
        raise ValueError(CANARY)
    among = spans()
    assert len(among) > 4
    told = "".join(one.to_json() for one in among)
    assert CANARY not in told
    assert str(tmp_path) not in told
    assert {key for one in among for key in one.attributes} <= ALLOWED
    assert not any(one.events for one in among), "a recorded exception has a text"
    failed = among[-1]
    assert failed.status.description == "ValueError"


def test_an_attribute_that_is_not_allowed_is_refused(spans: Any) -> None:
    with refuses(AssertionError, "data"), span("request", client=3):
        pass


def test_what_another_machine_says_is_no_parent(spans: Any) -> None:
    with span("device", parent="nonsense\n"):
        pass
    assert spans()[0].parent is None


@pytest.mark.parametrize(
    "variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}]
)
def test_traces_are_off_unless_the_variables_ask(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing.tracer() is None
    assert here() == ""
    with span("run", rounds=1) as facts:
        facts["clients"] = 1


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]
)
def test_what_polyfed_does_not_have_is_said_and_the_run_goes_on(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra polyfed[otel] is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with warned(value):
        assert tracing.tracer() is None
    assert tracing.tracer() is None, "it is said once"


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError("No module named 'opentelemetry'")
sys.meta_path.insert(0, Absent())
import polyfed
polyfed.run(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


@pytest.mark.parametrize("asked", [False, True])
def test_without_the_extra_a_run_imports_nothing_and_says_what_is_missing(asked: bool, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("rounds = 2", "rounds = 1"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} if asked else {}
    words = [sys.executable, "-c", WITHOUT, str(tmp_path / "recipe.toml")]
    ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ("polyfed[otel]" in ended.stderr) == asked
