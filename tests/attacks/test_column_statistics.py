"""What a device tells of its columns at enrolment: words and means of too few rows stay, whatever the recipe says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from polyfed.deploy.handlers import Deployed
from polyfed.engines.protocol import ENROLLED, REFUSED, hello

RECIPE = """
seed = 1
rounds = 1
[data]
name = "npz"
path = "x.npz"
modalities = {{ person = ["job", "dose", "age"] }}
columns = {{ job = {{ kind = "one-hot", min_rows = 1 }}, dose = {{ kind = "mean", min_rows = 1 }}, age = "mean" }}
[clients]
num = 2
[model.encoders]
person = {{ kind = "mlp", hidden = [4] }}
[algorithm]
name = "fedavg"
{more}
"""
ALLOW = '[allow]\ncolumns = ["job", "dose", "age"]\n'
JOBS = ["nurse"] * 30 + ["baker"] * 9 + ["astronaut"]


def enrolled(folder: Path, policy: str, more: str = "") -> dict[str, Any]:
    """The answer of a device in which one job and one dose are those of a single row."""
    dose = np.full(40, np.nan)
    dose[39] = 123.25
    age = np.arange(40.0)
    label = np.arange(40) % 2
    np.savez(folder / "data.npz", job=np.array(JOBS), dose=dose, age=age, label=label, split=np.zeros(40, np.int64))
    (folder / "recipe.toml").write_text(RECIPE.format(more=more))
    (folder / "policy.toml").write_text(ALLOW + policy)
    config = {"data": str(folder / "data.npz"), "policy": str(folder / "policy.toml"), "state": str(folder / "state")}
    return Deployed(folder / "recipe.toml")(hello(), config | {"client": 1, "modalities": "person"}).header


def test_a_word_and_a_mean_of_a_single_row_stay_on_the_device(tmp_path: Path) -> None:
    open_, limited = (enrolled(tmp_path, policy)["columns"]["person"] for policy in ("", LIMITED))
    assert set(open_["job"]["words"]) == {*JOBS}, "the recipe asks for words and sums of a single row"
    assert (open_["dose"]["count"], open_["dose"]["total"]) == (1, 123.25)
    assert set(limited["job"]["words"]) == {"nurse"}
    assert (limited["dose"]["count"], limited["dose"]["total"]) == (0, 0.0)
    assert (limited["age"]["count"], limited["age"]["total"]) == (40, 780.0)


LIMITED = "[limits]\nmin_rows_per_class = 10\n"

NOISE = """[privacy]
unit = "example"
delta = 0.001
clip_norm = 0.5
noise_multiplier = 8.0
unprotected = ["statistic"]
"""
MASKS = "[secure_aggregation]\nmin_clients = 2\n"


@pytest.mark.parametrize(
    ("required", "more"),
    [
        ('max_epsilon = 50.0\ndelta = 0.001\nunit = "example"', NOISE),
        ("secure_aggregation = true", MASKS),
    ],
)
def test_a_device_that_demands_noise_or_masks_tells_no_words_and_means(
    required: str, more: str, tmp_path: Path
) -> None:
    policy = f"[require]\n{required}\n"
    told = enrolled(tmp_path, policy, more)
    assert told["verdict"] == REFUSED
    assert "each client would tell its words and means without noise and without a mask" in told["reason"]
    told = enrolled(tmp_path, f'{policy}unprotected = ["statistic"]\n', more)
    assert told["verdict"] == ENROLLED or "words and means" not in told["reason"]
