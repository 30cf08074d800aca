"""A recipe is text: what it names is called only if it is a part of a run, and on a device only if its owner allows it.

Each attack would leave a file, the trace; none may be there afterwards.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines.federations import PATIENCE, Federation, recipe_for
from polyfed.cli import main
from polyfed.core.errors import CheckpointError, EgressError, ModelError, NotAllowed, RecipeError
from polyfed.core.registry import Allowance, only
from polyfed.deploy.device.configuration import NodeConfig
from polyfed.engines.protocol import hello
from polyfed.experiment.recipes.recipe import load_recipe
from polyfed.experiment.running import checkpoint
from polyfed.model import ModelSpec, build_model
from refusals import refuses

TRAP = '''
import os
from dataclasses import dataclass
from pathlib import Path

def leave_a_trace(*args, **options):
    Path(os.environ["TRACE"]).touch()

class Made:
    def __new__(cls, *args, **options):
        leave_a_trace()
        return super().__new__(cls)

@dataclass(frozen=True, kw_only=True)
class Whole:
    """Has every method that a part of a run has, and is none."""
    num: int = 2

    def __post_init__(self):
        leave_a_trace()

    load = split = choose = follow = init = round = forward = leave_a_trace

class Liar:
    """An object that calls itself a class, and whose name for people is a trap too."""
    __class__ = property(lambda self: type)
    __call__ = __repr__ = leave_a_trace

LIAR = Liar()
'''

RECIPE = """
rounds = 1
[data]
name = "toy"
rows = 60
[clients]
num = 2
[model]
embedding = 4
[model.encoders]
a = { kind = "mlp" }
b = { kind = "mlp" }
[algorithm]
name = "fedavg"
"""

SECTIONS = {
    "encoder": ('a = { kind = "mlp" }', "a = {{ kind = '{}' }}"),
    "algorithm": ('name = "fedavg"', "name = '{}'"),
    "selection": ('[algorithm]\nname = "fedavg"', "[algorithm]\nname = 'fedavg'\n[selection]\nname = '{}'"),
    "data": ('name = "toy"\nrows = 60', "name = '{}'"),
    "partition": ("[clients]\n", "[clients]\npartition = '{}'\n"),
    "tracking": ("[model]\n", "[tracking]\nname = '{}'\n[model]\n"),
}
"""What stands in the recipe, and what stands there instead."""

STANDARD = "is a module of Python's standard library"
ATTACKS = {
    "subprocess:Popen": STANDARD,
    "os:system": STANDARD,
    "builtins:exec": STANDARD,
    "this:s": STANDARD,
    "pathlib:Path.unlink": "cannot be imported. It must read 'package.module:Class'",
    "trap:Made": "it is the class trap.Made",
    "trap:Whole": "it is the class trap.Whole",
    "trap:leave_a_trace": "it is of type function",
    "trap:LIAR": "it is of type Liar",
    "traps.__main__:Made": "is a command, which would be run",
}
"""What a recipe may try, and words of the refusal."""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that an attack would leave; modules with traps are on the path."""
    home = tmp_path / "home"
    (home / "traps").mkdir(parents=True)
    (home / "trap.py").write_text(TRAP)
    (home / "traps" / "__main__.py").write_text(TRAP + "\nleave_a_trace()\n")
    monkeypatch.syspath_prepend(home)
    monkeypatch.setenv("TRACE", str(tmp_path / "trace"))
    yield tmp_path / "trace"
    for name in [name for name in sys.modules if name.split(".")[0] in ("trap", "traps", "face")]:
        del sys.modules[name]


def told(words: tuple[str, ...], capsys: Any) -> tuple[Any, str]:
    """Exit code and error of a command."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_recipe_names_is_not_called_unless_it_is_a_part_of_a_run(
    section: str, attack: str, trace: Path, tmp_path: Path, capsys: Any
) -> None:
    before, after = SECTIONS[section]
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(before, after.format(attack)))
    code, text = told(("check", str(tmp_path / "recipe.toml")), capsys)
    assert code == 2
    assert ATTACKS[attack] in text
    assert f"'{attack}'" in text
    assert not trace.exists()


@pytest.mark.parametrize("attack", ["subprocess:Popen", "trap:Made", "trap:Whole"])
def test_a_command_that_describes_an_algorithm_does_not_call_it_either(attack: str, trace: Path, capsys: Any) -> None:
    code, text = told(("algorithms", attack), capsys)
    assert code == 2
    assert ATTACKS[attack] in text
    assert not trace.exists()


def test_options_of_an_encoder_reach_no_command(trace: Path, tmp_path: Path, capsys: Any) -> None:
    entry = f"{{ kind = 'subprocess:Popen', args = ['touch', '{trace}'] }}"
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('{ kind = "mlp" }', entry))
    for command in (("run", "--out", str(tmp_path / "run")), ("check",)):
        code, text = told((command[0], str(tmp_path / "recipe.toml"), *command[1:]), capsys)
        assert code == 2
        assert STANDARD in text
    assert not trace.exists()


def test_a_module_that_cannot_hold_a_part_of_a_run_is_not_even_imported(trace: Path) -> None:
    for kind in ("this:s", "antigravity:fly", "traps.__main__:Made"):
        with refuses(ModelError, "is not imported"):
            build_model(ModelSpec(encoders={"a": {"kind": kind}}), {"a": (3,)}, 2)
        assert kind.partition(":")[0] not in sys.modules


@dataclass
class Reached:
    """A dataclass of a module that one of polyfed's has imported."""

    marks: list[int]

    def __post_init__(self) -> None:
        self.marks.append(1)


def test_a_checkpoint_names_no_class_through_another_module(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint, "elsewhere", sys.modules[__name__], raising=False)
    monkeypatch.setattr(checkpoint, "Reached", Reached, raising=False)
    monkeypatch.setattr(checkpoint, "built", Allowance(), raising=False)  # an object of a dataclass, not a class
    checkpoint.save(tmp_path, 1, {"found": checkpoint.pack(Allowance(), {})})
    for path in ("checkpoint:elsewhere.Reached", "checkpoint:Reached", "checkpoint:built"):
        skeleton = {"class": f"polyfed.{path}", "fields": [["marks", {"list": []}]]}
        with refuses(ValueError, path):
            checkpoint.unpack(skeleton, {}, ())
    with refuses(CheckpointError, "polyfed.experiment.running.checkpoint:Reached"):
        read_with(
            tmp_path, {"class": "polyfed.experiment.running.checkpoint:Reached", "fields": [["marks", {"list": []}]]}
        )


def read_with(folder: Path, skeleton: Any) -> Any:
    """Load a checkpoint after its skeleton was exchanged, its checksum with it."""
    (path,) = folder.rglob("state.json")
    path.write_text(json.dumps(skeleton))
    latest = json.loads((folder / "latest.json").read_text())
    latest["sha256"]["state.json"] = checkpoint.sha256_of(path)
    (folder / "latest.json").write_text(json.dumps(latest))
    return checkpoint.load(folder)


CODE = """
import os
from pathlib import Path
Path(os.environ["TRACE"]).touch()
from transformers import BertConfig as Config
from transformers import BertModel as Net
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small model of `transformers`, saved."""
    transformers = pytest.importorskip("transformers", reason="the extra polyfed[text] is not installed")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def with_model(path: Path) -> ModelSpec:
    return ModelSpec(embedding=4, encoders={"a": {"kind": "hf", "path": str(path)}})


def test_code_that_comes_with_a_saved_model_is_not_run_nor_asked_about(
    saved: Path, trace: Path, monkeypatch: Any
) -> None:
    (saved / "code.py").write_text(CODE)
    table = json.loads((saved / "config.json").read_text())
    table |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Net"}}
    (saved / "config.json").write_text(json.dumps(table))
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    with refuses(ModelError, "custom code"):
        build_model(with_model(saved), {"a": (5,)}, 2)
    assert not asked
    assert not trace.exists()


def test_weights_that_are_a_pickle_are_not_opened(saved: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with refuses(ModelError, "model.safetensors"):
        build_model(with_model(saved), {"a": (5,)}, 2)


@pytest.mark.parametrize(
    ("entry", "path", "allowed"),
    [
        ("mine.parts:Face", "mine.parts:Face", True),
        ("mine.parts:Face", "mine.parts:Voice", False),
        ("mine.parts:Face", "mine.parts.Face:Face", False),
        ("mine.*", "mine:Face", True),
        ("mine.*", "mine.deep.parts:Face", True),
        ("mine.*", "mines.parts:Face", False),
        ("mine.parts.*", "mine.other:Face", False),
    ],
)
def test_an_entry_allows_what_it_says_and_no_more(entry: str, path: str, allowed: bool) -> None:
    assert Allowance.parse({"imports": [entry]}, "[allow]").has_import(path) is allowed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[allow]\nimports = ["*"]\n', "'*' must read"),
        ('[allow]\nimports = ["mine:*"]\n', "must read"),
        ('[allow]\nimports = "mine:Face"\n', "list of words"),
        ('[allow]\nimport = ["mine:Face"]\n', "mean 'imports'"),
        ("allow = 1\n", "write [allow]"),
    ],
)
def test_a_wrong_allow_list_is_refused_and_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(text)
    node = NodeConfig(data="x.npz", client=0, modalities="a", policy=str(tmp_path / "own.toml"))
    with refuses(RecipeError, words) as caught:
        node.rules  # noqa: B018
    assert "own.toml" in str(caught.value)


FACE = """
import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from polyfed.algorithms.averaging import Averaging
from polyfed.data import Partition
from polyfed.data.partitions.iid import Iid
from polyfed.data.sources import Toy
from polyfed.selection import Uniform
from polyfed.experiment.results.tracking import TensorBoard

Path(os.environ["TRACE"]).touch()

class Face(nn.Sequential):
    def __init__(self, shape, embedding):
        super().__init__(nn.Linear(shape[0], embedding))

@dataclass(frozen=True, kw_only=True)
class Mean(Averaging): ...

@dataclass(frozen=True, kw_only=True)
class First(Uniform): ...

@dataclass(frozen=True, kw_only=True)
class Rows(Toy): ...

@dataclass(frozen=True, kw_only=True)
class Dealt(Iid): ...

@dataclass(frozen=True, kw_only=True)
class Board(TensorBoard): ...
"""
"""Parts that are what they say; importing them leaves a trace."""

OF_CLIENTS = {"encoder": "face:Face", "algorithm": "face:Mean", "selection": "face:First"}
"""Parts whose code runs on devices."""

OF_THE_SERVER = {"data": "face:Rows", "partition": "face:Dealt", "tracking": "face:Board"}
HELLO = hello()


@pytest.fixture
def devices(trace: Path, tmp_path: Path, monkeypatch: Any) -> Any:
    """Makes three devices for a recipe in which a section names a part of `face`, which is not imported yet."""
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    from engines.devices import Devices

    (trace.parent / "home" / "face.py").write_text(FACE)

    def made(section: str, name: str) -> Any:
        before, after = SECTIONS[section]
        recipe = RECIPE.replace("num = 2", "num = 3").replace(before, after.format(name)) + "[engine]\n"
        found = Devices(tmp_path, recipe)
        sys.modules.pop("face", None)  # the server's half, in this process, has it
        trace.unlink(missing_ok=True)
        return found

    return made


def allow(devices: Any, client: int, text: str) -> None:
    """Write the policy of a device."""
    (devices.places[client] / "policy.toml").write_text(text)


@pytest.mark.parametrize("section", OF_CLIENTS)
def test_a_device_imports_nothing_that_its_owner_has_not_allowed(section: str, devices: Any, trace: Path) -> None:
    name = OF_CLIENTS[section]
    made = devices(section, name)
    line = f'[allow] imports = ["{name}"]'
    for policy in ("[allow]\n", '[allow]\nimports = ["face:Other", "faces.*"]\n'):
        allow(made, 1, policy)
        answer = made.handler(HELLO, made.configs[1])
        assert answer.header["verdict"] == "refused"
        assert (
            f"client 1 refused the recipe: [{'model.encoders] a.kind' if section == 'encoder' else section + '] name'}"
            in answer.header["reason"]
        )
        assert line in answer.header["reason"]
        assert str(made.app) not in answer.header["reason"], "no path of the device"
    made.configs[1]["policy"] = ""
    assert line in made.handler(HELLO, made.configs[1]).header["reason"], "without a policy file nothing is allowed"
    assert "face" not in sys.modules
    assert not trace.exists()


@pytest.mark.parametrize("section", OF_CLIENTS)
@pytest.mark.parametrize("entry", ["", "face.*"])
def test_what_the_owner_allowed_runs(section: str, entry: str, devices: Any, trace: Path, tmp_path: Path) -> None:
    name = OF_CLIENTS[section]
    made = devices(section, name)
    for client in range(3):
        allow(made, client, f'[allow]\nimports = ["{entry or name}"]\n')
    assert made.serve(tmp_path / "run")["rounds"] == 1
    assert trace.exists()


def test_the_policies_of_a_demonstration_allow_what_its_recipe_names(devices: Any, tmp_path: Path) -> None:
    made = devices("encoder", "face:Face")
    node = NodeConfig(data="x.npz", client=0, modalities="a", policy=str(made.places[0] / "policy.toml"))
    assert node.rules.allowance == Allowance(imports=("face:Face",))
    assert made.serve(tmp_path / "run")["rounds"] == 1


@pytest.mark.parametrize("section", OF_THE_SERVER)
def test_what_only_the_server_uses_is_neither_imported_nor_read_on_a_device(
    section: str, devices: Any, trace: Path
) -> None:
    made = devices(section, OF_THE_SERVER[section])
    allow(made, 1, "[allow]\n")
    answer = made.handler(HELLO, made.configs[1])
    assert answer.header["verdict"] == "enrolled"
    assert answer.header["rows"] > 0
    assert "face" not in sys.modules
    assert not trace.exists()


def test_the_servers_data_is_not_read_on_a_device(devices: Any, tmp_path: Path, capsys: Any) -> None:
    made = devices("encoder", "mlp")
    recipe = made.app / "recipe.toml"
    other = made.places[0] / ".." / "1" / "data.npz"
    recipe.write_text(
        recipe.read_text().replace('name = "toy"\nrows = 60', f'name = "npz"\npath = "{other}"\nmodalities = ["a"]')
    )
    before = made.handler(HELLO, made.configs[0])
    other.unlink()
    assert made.handler(HELLO, made.configs[0]).header == before.header
    made.configs[0]["data"] = ""
    assert made.handler(HELLO, made.configs[0]).header["verdict"] == "failed", "and no other rows in place of its own"


def test_a_saved_model_is_read_on_a_device_only_if_its_owner_allowed_it(saved: Path, devices: Any) -> None:
    made = devices("encoder", "mlp")
    recipe = made.app / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("kind = 'mlp'", f"kind = 'hf', path = '{saved}'"))
    allow(made, 1, "[allow]\n")
    answer = made.handler(HELLO, made.configs[1])
    assert answer.header["verdict"] == "refused"
    assert f'[allow] models = ["{saved}"]' in answer.header["reason"]
    allow(made, 1, f'[allow]\nmodels = ["{saved}"]\n')
    assert made.handler(HELLO, made.configs[1]).header["verdict"] == "enrolled"
    with only(Allowance()), refuses(NotAllowed, "model.encoders.a: allowed to read"):
        build_model(with_model(saved), {"a": (5,)}, 2)


def test_a_refusal_ends_the_run_in_the_words_of_the_device(devices: Any, tmp_path: Path) -> None:
    made = devices("algorithm", "face:Mean")
    allow(made, 1, "[allow]\n")
    with refuses(EgressError, 'imports = ["face:Mean"]'):
        made.serve(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "error.json").read_text())["exit_code"] == 3
    recipe = made.app / "recipe.toml"
    recipe.write_text(recipe.read_text() + '\n[deployment]\non_refusal = "drop"\nmin_nodes = 2\nenrol_seconds = 3600\n')
    # the run does not wait an hour for the client that has refused
    assert made.serve(tmp_path / "run")["rounds"] == 1


@pytest.mark.parametrize("section", [*OF_CLIENTS, *OF_THE_SERVER])
def test_checking_a_device_imports_no_more_than_the_device_would(
    section: str, devices: Any, trace: Path, capsys: Any
) -> None:
    name = (OF_CLIENTS | OF_THE_SERVER)[section]
    made = devices(section, name)
    place, recipe = made.places[1], str(made.app / "recipe.toml")
    allow(made, 1, "[allow]\n")
    config = f'data="{place}/data.npz" client=1 modalities="a,b" policy="{place}/policy.toml"'
    for node in (config, f"{place}/policy.toml"):
        code, text = told(("check", recipe, "--node", node), capsys)
        unread = node != config and section in ("data", "partition")  # without rows, the command must say so
        assert code == (3 if section in OF_CLIENTS else 5 if unread else 0), text
        assert (f'[allow] imports = ["{name}"]' in text) is (section in OF_CLIENTS)
    assert "face" not in sys.modules
    assert not trace.exists()
    allow(made, 1, f'[allow]\nimports = ["{name}"]\n')
    for node in (config, f"{place}/policy.toml"):
        unread = node != config and section in ("data", "partition")
        assert told(("check", recipe, "--node", node), capsys)[0] == (5 if unread else 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_devices_import_only_what_their_owners_allow(trace: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Each device's processes would leave a trace of their own."""
    pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")
    home = tmp_path / "home"
    (home / "face.py").write_text(FACE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]))
    recipe = recipe_for("fedavg", tmp_path, rounds=1)
    recipe.write_text(recipe.read_text().replace('name = "fedavg"', 'name = "face:Mean"'))
    assert load_recipe(recipe).table()["algorithm"]["name"] == "face:Mean"
    traces = {client: tmp_path / f"trace-{client}" for client in range(3)}
    with Federation(recipe, tmp_path / "fed") as federation:
        federation.environments = {f"device-{client}": {"TRACE": str(path)} for client, path in traces.items()}
        policy = federation.nodes[1] / "policy.toml"
        allowed = policy.read_text()
        assert 'imports = [\n    "face:Mean",\n]' in allowed
        policy.write_text("[allow]\nimports = []\n")
        federation.start()
        federation.run().wait(PATIENCE)
        told = json.loads((federation.out / "error.json").read_text())
        assert told["exit_code"] == 3
        assert "client 1 refused the recipe: [algorithm] name = 'face:Mean'" in told["text"]
        assert '[allow] imports = ["face:Mean"]' in federation.log("device-1")
        assert not traces[1].exists()
        policy.write_text(allowed)
        shutil.rmtree(federation.out)
        federation.run().wait(PATIENCE)
        assert json.loads((federation.out / "result.json").read_text())["rounds"] == 1
        assert traces[1].exists()
