"""`polyfed check RECIPE --node policy.toml` reads somebody else's recipe, and must not write where it says."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets", reason="the extra polyfed[text] is not installed")

from polyfed.cli import main

RECIPE = """
[data]
name = "hf"
path = "{folder}/victim"
cache = "{folder}/stolen"
label = "label"
[data.modalities]
x = "values"
[clients]
num = 2
[model]
embedding = 4
[model.encoders]
x = {{ kind = "mlp", hidden = [4] }}
[algorithm]
name = "fedavg"
"""


def files(folder: Path) -> set[Path]:
    """All files and folders, without the cache of PyTorch's compiler."""
    return {path.relative_to(folder) for path in folder.rglob("*") if "torchinductor" not in str(path)}


def checked(folder: Path, *options: str) -> Any:
    with pytest.raises(SystemExit) as stop:
        main(("check", str(folder / "recipe.toml"), *options))
    return stop.value.code


@pytest.mark.filterwarnings("ignore:.*measures nothing")
def test_a_check_on_a_device_copies_no_data_to_the_cache_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "victim").mkdir()
    rows = "".join(f"{i % 2},{i}.5,{i}\n" for i in range(40))
    (tmp_path / "victim" / "train.csv").write_text("label,x,secret\n" + rows)
    (tmp_path / "policy.toml").write_text('[egress.shared]\nserver = ["statistic", "parameters"]\n')
    (tmp_path / "recipe.toml").write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = files(tmp_path)
    assert not checked(tmp_path, "--node", str(tmp_path / "policy.toml"))
    assert "The recipe would send" in capsys.readouterr().out, "the shapes were read from the data"
    assert files(tmp_path) == before, "nothing was written that is still there"
    checked(tmp_path)
    assert Path("stolen") in files(tmp_path), "on the owner's own recipe, the cache is used"
