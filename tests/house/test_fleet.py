"""The rules behind docs/results/fleet.md meet the measured points, and the page has the table that they give."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "results" / "fleet.md").read_text()


@pytest.fixture(scope="module")
def fleet() -> Any:
    spec = importlib.util.spec_from_file_location("fleet_of_devices", ROOT / "benchmarks" / "fleet.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = made = importlib.util.module_from_spec(spec)  # a dataclass asks for its module
    spec.loader.exec_module(made)
    return made


def test_the_page_has_the_table_of_the_rules(fleet: Any) -> None:
    assert fleet.table() in PAGE


def test_the_rules_give_the_points_that_were_measured(fleet: Any) -> None:
    """The first columns of the page's table of points, for 3 and 200 devices."""
    points = {
        name.strip(): [float(word) for word in re.findall(r"[\d.]+", values)][:2]
        for name, values in re.findall(r"^\| ([^|]+) \|((?: [\d.]+ \|){3})$", PAGE, re.MULTILINE)
    }
    rules = {
        "memory of the server, MB": ("memory of `polyfed server`", 1e-6, 0.02),
        "its processor time while nobody asks, ms a minute": (
            "its processor time while nobody asks, cores",
            60e3,
            0.02,
        ),
        "its open files": ("open files", 1.0, 0.0),
    }
    for name, (rule, factor, error) in rules.items():
        for count, measured in zip((3, 200), points[name], strict=True):
            assert fleet.ROWS[rule][1](count, count, fleet.COST) * factor == pytest.approx(measured, rel=error), name
    three, many = points["its processor time from the start until all have logged in, s"]
    assert 1e3 * (many - three) / 197 == pytest.approx(fleet.COST.login_ms, rel=0.02)
    requests = points["its processor time, ms a device and request"]
    assert requests[1] == fleet.COST.request_ms


def test_other_costs_and_fleets_give_another_table(fleet: Any) -> None:
    made = fleet.table([(50, 5)], replace(fleet.COST, request_ms=2.0, device_mb=1.0))
    rows = dict(line[2:-2].split(" | ") for line in made.splitlines() if " | " in line)
    assert rows["devices"] == "50, 5 asked"
    assert rows["its processor time for one request"] == "0.01 s"
    assert rows["memory of `polyfed server`"] == "99 MB"
    assert rows["ledgers at a device, a month"] == "550 kB"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(3600 * 26, "s", "26 h"), (0.0123, "s", "0.012 s"), (1500, "B", "1.5 kB"), (1.25e9, "B", "1.2 GB"), (7, "", "7")],
)
def test_numbers_have_two_digits_and_a_unit(fleet: Any, value: float, unit: str, text: str) -> None:
    assert fleet.shown(value, unit) == text
