"""Methods that try to have something leave a client which `polyfed check` does not announce: each is announced, with
the right verdict, or refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attacks.smuggling import EVERYTHING, OPEN, TRAIN, announced, hiding, places, refused, smuggler, under, update_with
from polyfed.algorithms.averaging import Averaging, Update
from polyfed.algorithms.base import Broadcast
from polyfed.cli import main
from polyfed.core.errors import EgressError, RecipeError
from polyfed.core.messages import Message, carries, message
from polyfed.core.tasks import task
from polyfed.core.tree import Tree
from polyfed.data import ClientsSpec
from polyfed.experiment.checks.check import check
from polyfed.experiment.running.assembly import assemble
from polyfed.start import run
from refusals import refuses
from world import recipe

SENSITIVE = ("predictions", "embeddings", "prototypes", "raw", "ids")


# a tree under a name that its message does not declare


@pytest.mark.parametrize("allowed", [False, True], ids=["default policy", "open policy"])
@pytest.mark.parametrize("kind", SENSITIVE)
def test_a_tree_of_no_modality_does_not_leave_unannounced(kind: str, allowed: bool) -> None:
    said = refused(
        recipe(hiding(update_with(kind), under("shared")), egress=EVERYTHING if allowed else OPEN),
        f'carries("{kind}", blocks=("modalities", "shared"))',
    )
    assert ("and the client's policy: [egress.shared] server = [" in said) != allowed


@pytest.mark.parametrize("kind", SENSITIVE)
def test_a_declared_tree_of_no_modality_is_announced_with_the_policys_verdict(kind: str) -> None:
    method = hiding(update_with(kind, blocks=("shared",)), under("shared"))
    checked = check(recipe(method))
    (row,) = checked.refused
    assert (row.field, row.kind, row.block, row.bytes) == ("extra", kind, "shared", 12)
    assert [fix for fix in checked.fixes if kind in fix] == list(checked.fixes)
    with refuses(EgressError, f"{kind} of shared"):
        run(recipe(method))
    kinds = ["parameters", "statistic", kind]
    wanted = ("extra", kind, "shared", "server")
    if kind == "ids":  # the server takes whole numbers only
        method = hiding(
            update_with(kind, blocks=("shared",)), lambda context, data: {"shared": data.num_rows.reshape(1)}
        )
    announced(recipe(method, egress={"shared": {"server": kinds}}), wanted)


@pytest.mark.parametrize("kind", ["statistic", "embeddings", "labels"])
def test_a_name_of_nothing_carries_nothing_out(kind: str) -> None:
    made = recipe(hiding(update_with(kind), under("patient_17")), egress=EVERYTHING)
    said = refused(made, "holds a name")
    assert "patient" not in said, "the words of a refusal leave a device"


@pytest.mark.parametrize("name", ["patient_17.w", "labels.w"])
def test_parameters_of_a_block_of_nothing_do_not_leave(name: str) -> None:
    made = recipe(hiding(update_with("parameters", partial=True), under(name)))
    assert "patient" not in refused(made, "of a block")


@pytest.mark.filterwarnings("ignore:no client has training rows")
def test_a_client_sends_nothing_of_a_modality_that_it_lacks() -> None:
    clients = ClientsSpec(partition="iid", num=4, holdings=[["a"]])
    made = recipe(hiding(update_with("statistic"), under("b")), clients=clients)
    refused(made, "with whole=True those")


def test_what_belongs_to_all_is_announced_for_a_client_that_lacks_some_of_it() -> None:
    method = hiding(update_with("statistic", whole=True), under("b"))
    announced(recipe(method), ("extra", "statistic", "b", "server"))
    parts = assemble(recipe(method))
    without = next(client for client in parts.fed.clients if parts.fed.clients.owned(client) == ("a",))
    assert ("update", "extra", "b") in parts.engine.announcement(parts.fed.clients.owned(without)).rows


def test_a_statistic_of_labels_is_ruled_by_the_row_of_labels() -> None:
    method = hiding(update_with("statistic", blocks=("labels",)), under("labels"))
    assert {(row.block, row.fix) for row in check(recipe(method)).refused} == {
        ("labels", '[egress.labels] server = ["statistic"]')
    }
    made = recipe(method, egress={"labels": {"server": ["statistic"]}})
    announced(made, ("extra", "statistic", "labels", "server"))
    method = hiding(update_with("statistic"), under("labels"))
    refused(recipe(method), 'blocks=("modalities", "shared", "labels")')


# a field that is not what its annotation says


@pytest.mark.parametrize(
    "value", [torch.zeros(3), None, "labels 0 1 1", {"a": {"b": torch.zeros(3)}}, [torch.zeros(3)]]
)
def test_a_tree_that_is_none_is_refused(value: Any) -> None:
    made = recipe(hiding(update_with("embeddings"), lambda context, data: value), egress=OPEN)
    refused(made, "as a Tree", RecipeError)


@pytest.mark.parametrize("value", [{"a": torch.zeros(3)}, None])
def test_a_tensor_that_is_none_is_refused(value: Any) -> None:
    made = recipe(hiding(update_with("statistic", Tensor), lambda context, data: value))
    refused(made, "as a Tensor", RecipeError)


@pytest.mark.parametrize("hint", [Tree | None, Tensor | None, Any, list[Tensor]], ids=str)
def test_a_field_is_a_tensor_or_a_tree(hint: Any) -> None:
    with refuses(RecipeError, "annotated"):
        update_with("embeddings", hint)


@pytest.mark.parametrize(
    ("kind", "hint", "said", "words"),
    [
        ("gradients", Tensor, {}, "gradients come in"),
        ("embeddings", Tree, {"of": "a"}, "for a Tensor"),
        ("embeddings", Tensor, {"blocks": ("shared",)}, "for a Tree"),
        (
            "embeddings",
            Tree,
            {"blocks": "shared"},
            "blocks = 'shared'",
        ),
        ("embeddings", Tree, {"blocks": ("audio",)}, "blocks = ('audio',)"),
        ("parameters", Tree, {"blocks": ("labels",)}, "read, shared"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused(kind: str, hint: Any, said: Any, words: str) -> None:
    with refuses(RecipeError, words):
        update_with(kind, hint, **said)


def test_a_tensor_is_of_a_modality_that_there_is() -> None:
    method = hiding(update_with("statistic", Tensor, of="c"), lambda context, data: torch.zeros(3))
    with refuses(RecipeError, "of = 'c'"):
        check(recipe(method))
    method = hiding(update_with("embeddings", Tensor, of="b"), lambda context, data: torch.zeros(3))
    assert places(check(recipe(method)).refused) == {("extra", "embeddings", "b", "server")}


# a reply that is another message


@message
class Other(Message):
    """The fields of an update, and what nobody declared."""

    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    sketch: Tensor = carries("statistic", shape=(None,))


@message
class Longer(Update):
    """An update, and more."""

    sketch: Tensor = carries("statistic", shape=(None,))


class Undecorated(Update):
    """An update in which something can be hung up."""


@pytest.mark.parametrize("kind", [Other, Longer, Undecorated])
def test_a_reply_of_another_type_does_not_leave(kind: Any) -> None:
    def make(context: Any, data: Any, fit: Any) -> Message:
        more = () if kind is Undecorated else (torch.zeros(2000),)
        reply: Message = kind(fit.params, fit.loss, data.num_rows, *more)
        return reply

    said = refused(recipe(smuggler(Update, make)), "message Update to")
    assert kind.__name__ not in said, "the words of a refusal leave a device"
    found = smuggler(kind, make)
    if kind is not Undecorated:
        announced(recipe(found), ("sketch", "statistic", "shared", "server"))


@dataclass(frozen=True, kw_only=True)
class Undecided(Averaging):
    """Does not say with which of two messages it answers."""

    @task()
    def update(self, context: Any, data: Any, local: Tree, got: Broadcast) -> tuple[Update | Other, Tree]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Silent(Averaging):
    """Says nothing of its answer."""

    @task()
    def update(self, context: Any, data: Any, local: Tree, got: Broadcast) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("method", [Undecided, Silent])
def test_a_task_says_which_one_message_it_answers_with(method: Any) -> None:
    with refuses(RecipeError, f"{method.__name__}.update does not"):
        check(recipe(method(train=TRAIN)))


# the command


MODULE = """
from dataclasses import dataclass
import torch
from torch import Tensor
from polyfed.algorithms import Averaging
from polyfed.core.messages import Message, carries, message
from polyfed.core.tree import Tree

@message
class Hidden(Message):
    params: Tree = carries("parameters")
    loss: Tensor = carries("statistic")
    num_rows: Tensor = carries("statistic")
    extra: Tree = carries("predictions", shape=(None,){blocks})

@dataclass(frozen=True, kw_only=True)
class Hiding(Averaging):
    '''Hides predictions.'''
    replies = Hidden

    def reply(self, context, data, fit, got, local):
        return Hidden(fit.params, fit.loss, data.num_rows, {{"shared": torch.zeros(3)}}), local
"""

RECIPE = """
rounds = 1
[data]
name = "toy"
rows = 60
[clients]
partition = "iid"
num = 3
[model]
embedding = 4
[model.encoders]
a = {{ kind = "mlp", hidden = [4] }}
b = {{ kind = "mlp", hidden = [4] }}
[algorithm]
name = "{module}:Hiding"
[egress.a]
server = ["parameters", "gradients", "predictions", "statistic"]
[egress.b]
server = ["parameters", "gradients", "predictions", "statistic"]
{egress}
"""

LINE = '[egress.shared]\nserver = ["parameters", "gradients", "predictions", "statistic"]'


def command(capsys: Any, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, " ".join((out + err).split())


@pytest.mark.parametrize(("module", "blocks"), [("hidden_tree", ""), ("declared_tree", ', blocks=("shared",)')])
def test_check_ends_with_3_and_names_the_line_that_would_allow_it(
    module: str, blocks: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text(MODULE.format(blocks=blocks))
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "hiding.toml"
    path.write_text(RECIPE.format(module=module, egress=""))
    for verb in (("check", str(path)), ("run", str(path), "--out", str(tmp_path / "out"))):
        code, text = command(capsys, *verb)
        assert code == 3
        assert LINE.replace("]\ns", "] s") in text
        assert (blocks != "") or 'carries("predictions", blocks=("modalities", "shared"))' in text
    path.write_text(RECIPE.format(module=module, egress=LINE))
    code, text = command(capsys, "check", str(path))
    assert code == (0 if blocks else 3)
