"""The file of `polyfed device`: what it may say, and all its mistakes at once."""

from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra polyfed[server] is not installed")

from polyfed.core.errors import RecipeError
from polyfed.deploy.credentials import write_credentials
from polyfed.deploy.device.device_file import device_file
from refusals import refuses

DEVICE = '[[device]]\nkey = "node-{0}.key"\ndata = "mine.npz"\nclient = {0}\nmodalities = ["a", "b"]\n'


def written(folder: Path, text: str) -> Path:
    write_credentials(folder, 2)
    (folder / "device.toml").write_text(text)
    return folder / "device.toml"


def test_paths_begin_at_the_folder_of_the_file(tmp_path: Path) -> None:
    told = device_file(
        written(
            tmp_path, 'server = "h:9092"\nparallel = 3\n' + DEVICE.format(0) + DEVICE.format(1) + 'state = "other"\n'
        )
    )
    assert (told["server"], told["ca"], told["parallel"]) == ("h:9092", f"{tmp_path}/ca.pem", 3)
    one, other = told["devices"]
    assert (one["key"], other["config"]["client"]) == (f"{tmp_path}/node-0.key", 1)
    assert one["config"]["data"] == f"{tmp_path}/mine.npz"
    assert one["config"]["modalities"] == "a,b"
    assert (one["config"]["state"], other["config"]["state"]) == (f"{tmp_path}/polyfed-state", f"{tmp_path}/other")


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    text = 'servr = "h:9092"\nparallel = "2"\n' + DEVICE.format(0) * 2
    text += '[[device]]\nkey = "no.key"\nclient = 2\ndata = "x"\nmodalities = "a"\n[[device]]\nclient = 3\n'
    with pytest.raises(RecipeError) as error:
        device_file(written(tmp_path, text))
    for part in ("did you mean 'server'", "parallel", "have the key", "have the state", "no.key", "4 has no key"):
        assert part in str(error.value), part


def test_a_server_and_its_authority_must_be_there(tmp_path: Path) -> None:
    with refuses(RecipeError, "server.example.org:9092"):
        device_file(written(tmp_path, 'server = "h"\n' + DEVICE.format(0)))
    with refuses(RecipeError, "lost.pem"):
        device_file(written(tmp_path, 'server = "h:1"\nca = "lost.pem"\n' + DEVICE.format(0)))


@pytest.mark.parametrize("text", ["", "device = 3", "[device]\nclient = 1", "server = ", "\x00"])
def test_a_file_that_is_none_is_refused_with_a_sentence(text: str, tmp_path: Path) -> None:
    with refuses(RecipeError, "device.toml"):
        device_file(written(tmp_path, text))
