"""What a server leaves behind when its run ends before or between rounds."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

from engines.devices import Devices
from polyfed.algorithms import Scaffold
from polyfed.core.errors import RecipeError
from polyfed.core.system.files import AUDIT, EGRESS
from polyfed.deploy.server.run_log import STATUS, RunStatus
from polyfed.deploy.server.server import ERROR, told_in
from polyfed.experiment.running.events import INTERRUPTED
from polyfed.report import reconcile
from refusals import refuses


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for line in (folder / AUDIT).read_text().splitlines() if "verdict" in (row := json.loads(line))]


def test_data_that_arrives_in_a_failed_set_up_is_in_the_audit_log_and_the_folder_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, out, begin = Devices(tmp_path), tmp_path / "run", Scaffold.init

    def asks_and_fails(self: Any, fed: Any, params: Any) -> Any:
        self.round(begin(self, fed, params), fed)
        raise RecipeError("the set-up failed")

    with monkeypatch.context() as patch:
        patch.setattr(Scaffold, "init", asks_and_fails)
        with refuses(RecipeError, "the set-up failed"):
            devices.serve(out)
    refused = rows_of(out)
    assert {row["client"] for row in refused if row["destination"] == "server"} == {0, 1, 2}
    assert {row["round"] for row in refused} == {0}
    assert not (out / EGRESS).exists()
    assert not (out / "recipe.toml").exists()
    devices.serve(out)
    assert rows_of(out)[: len(refused)] == refused
    states = [place / "polyfed-state" for place in devices.places]
    assert reconcile(out, states).findings == ()


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("a mistake"), "ValueError: a mistake"), (KeyboardInterrupt(), INTERRUPTED)],
    ids=["unexpected", "interrupted"],
)
def test_an_end_that_nobody_foresaw_is_in_the_status(error: BaseException, text: str, tmp_path: Path) -> None:
    status = RunStatus(tmp_path / "7", tmp_path)
    with pytest.raises(type(error)), told_in(tmp_path, status):
        raise error
    told = json.loads((tmp_path / "7" / STATUS).read_text())
    assert (told["state"], told["error"]) == ("failed", text)
    assert (tmp_path / ERROR).exists() == isinstance(error, Exception)
