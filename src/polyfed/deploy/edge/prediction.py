"""Predictions for a silo, with the processes of its edge and devices: nothing of it leaves the silo.

The command talks to the queue of the edge, as a run talks to that of its server, and to nobody else. The devices answer
requests of the run `predict-...` under their policies, and what passes is in their audit logs and in that of the edge.
"""

import secrets
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from torch import Tensor

from polyfed.algorithms.hfm.prediction import SiloAnswers, answered
from polyfed.algorithms.hfm.silo_exchange import Vertical
from polyfed.core.errors import BadReply, DataError, RecipeError, TransportError, command, counted
from polyfed.core.registry import only
from polyfed.core.system.json_and_toml import parse_json
from polyfed.data.reading.row_facts import ids_of
from polyfed.deploy.app_folder import RECIPE
from polyfed.deploy.device.configuration import recipe_on
from polyfed.deploy.device.tasks import packed
from polyfed.deploy.edge.edge_file import EdgeConfig, edge_file
from polyfed.deploy.edge.runtime import KNOWN, PATIENCE, AtWork, devices_of, met
from polyfed.deploy.server.hosting import serves
from polyfed.engines.protocol import Patience, RequestId, sign_packet
from polyfed.evaluation.subsets import named_by_row
from polyfed.experiment.evaluate import trained_facts
from polyfed.experiment.recipes.parts import build
from polyfed.experiment.recipes.recipe import Recipe
from polyfed.experiment.recipes.task_choice import task_of
from polyfed.experiment.running.warm_start import APP_COPY, values_in, write_text_copy
from polyfed.federation.silos.parts import in_lockstep
from polyfed.federation.wire.wire_format import Packet
from polyfed.privacy.egress.audit_log.log import AuditLog

END_SECONDS = 30.0
"""How long the edge waits until the devices have deleted what they kept of the prediction (inferred)."""

LEFT_OUT = ("tracking", "network", "stop", "attack")
"""Sections of the recipe that say nothing about predictions."""


def predict_at_edge(file: Path, model: Path, only_ids: Path | None = None) -> dict[str, list[Any]]:
    """Predict for the samples of a silo, whose edge and devices are running.

    Args:
        file: the file of `polyfed edge`.
        model: the trained model: a run, an exported model, or a safetensors file.
        only_ids: a text file with a sample id in each line. None for all samples.

    Returns:
        The columns of a table: `id`, those of `Objective.answers`, and `used`, the modalities of each answer.

    Raises:
        RecipeError: a file is wrong, the model does not fit, or the silo has taken part in no run yet.
        TransportError: the edge is not running.
        TooFewReplies: a device of the silo does not answer.
        EgressError: the policy of a device refuses.
        DataError: a file is damaged, the samples of the devices do not fit each other, or no device has a wanted id.
    """
    edge: EdgeConfig = build("the file of an edge", EdgeConfig, edge_file(file)["devices"][0]["config"]["edge"])
    if not serves(Path(edge.credentials)):
        raise TransportError(f"no edge uses {edge.credentials}; start it: {command('edge', file)}")
    wanted, texts = (None, {}) if only_ids is None else _wanted(only_ids)
    known = _known(edge, file)
    with tempfile.TemporaryDirectory(prefix="polyfed-") as spare:
        app = Path(spare)
        (app / RECIPE).write_text(_job(known["recipe"], model), encoding="utf-8")
        write_text_copy(values_in(model.expanduser()), app)
        with only(edge.node.rules.allowance):
            recipe = recipe_on(edge.node, app / RECIPE)
            found = _answers(edge, recipe, app, known["facts"], wanted)
    _refuse_unknown(found, texts)
    names = trained_facts(model).names
    columns: dict[str, list[Any]] = {"id": [texts.get(one, one) for one in found.ids.tolist()]}
    return columns | task_of(recipe).answers(found.predicted, names) | {"used": named_by_row(found.present)}


def _wanted(path: Path) -> tuple[Tensor, dict[int, str]]:
    """Return the ids in a file, and how the file writes each.

    Raises:
        DataError: the file cannot be read, or holds an id twice.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Give a text file with a sample id in each line") from None
    if not lines:
        raise DataError(f"{path} holds no sample id. Write one in each line, or leave out --only for all samples")
    ids = ids_of(np.array(lines), str(path))
    return ids, dict(zip(ids.tolist(), lines, strict=True))


def _known(edge: EdgeConfig, file: Path) -> dict[str, Any]:
    """Return the recipe and the facts of the latest run.

    Raises:
        RecipeError: the silo has taken part in no run.
    """
    path = edge.node.folder / KNOWN
    try:
        found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        return {"recipe": str(found["recipe"]), "facts": dict(found["facts"])}
    except FileNotFoundError:
        raise RecipeError(
            f"the edge of {file} has taken part in no run yet, so it knows no model. Train first: `polyfed submit` on "
            "the server"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}). Take part in a run again, or restore it") from None


def _job(text: str, model: Path) -> str:
    """Return the recipe of the prediction: that of the run, which starts from the model."""
    table = {name: one for name, one in tomllib.loads(text).items() if name not in LEFT_OUT}
    start = {name: one for name, one in table["model"].items() if name != "init_blocks"}
    table |= {"rounds": 1, "model": start | {"init": model.name}}
    table["algorithm"] = table["algorithm"] | {"eval_embeddings": True}
    table["evaluate"] = table.get("evaluate", {}) | {"personal": True, "conformal": "none"}
    return tomli_w.dumps(table)


def _answers(edge: EdgeConfig, recipe: Recipe, app: Path, facts: dict[str, Any], wanted: Tensor | None) -> SiloAnswers:
    """Enrol the devices of the silo, let them embed their rows, and predict."""
    method = recipe.algorithm
    assert isinstance(method, Vertical), "only such methods run with edges"
    run = f"predict-{secrets.token_hex(8)}"
    content = packed((app / RECIPE).read_text(encoding="utf-8"), (app / APP_COPY).read_text(encoding="utf-8"))
    with devices_of(edge, recipe, content, run=run) as (transport, session):
        known = met(transport, edge, PATIENCE * recipe.deployment.enrol_seconds)
        packet = Packet({"facts": facts, "seed": recipe.seed, "rounds": recipe.rounds, "kept": 0})
        request = RequestId(run, session, recipe.rounds, 0, edge.silo)
        try:
            silo = AtWork.of(edge, recipe, app, packet, request, known, transport, session)
        except BadReply as error:
            raise RecipeError(f"the model does not fit the latest run of this silo: the prediction {error}") from None
        members = method.devices(silo.fed).get(edge.silo, [])
        part = answered(method, edge.silo, members, silo.fed, wanted)
        try:
            found = in_lockstep(silo.fed, {edge.silo: part})
        finally:
            AuditLog(edge.node.folder).append(silo.engine.ledger.drain(), run)
            ends = {client: sign_packet(run, client, []) for client in transport.node_of}
            transport.exchange(ends, Patience(END_SECONDS, len(ends), 1, END_SECONDS))
    if edge.silo in found.missing:
        raise DataError(found.missing[edge.silo])
    answers: SiloAnswers = found.kept[edge.silo]
    return answers


def _refuse_unknown(found: SiloAnswers, texts: dict[int, str]) -> None:
    """Refuse to leave out a wanted sample, or to answer with no sample at all.

    Raises:
        DataError: no device has it, or not all modalities that `overlap` demands.
    """
    if unknown := [texts[one] for one in texts.keys() - set(found.ids.tolist())]:
        some = ", ".join(sorted(unknown)[:10]) + (", ..." if len(unknown) > 10 else "")
        raise DataError(
            f"{counted(len(unknown), 'sample has', 'samples have')} no prediction, because the devices of the silo "
            f"lack the id, or a modality that [algorithm] overlap demands: {some}. Remove the ids, or complete the data"
        )
    if not len(found.ids):
        raise DataError("the devices of the silo have no sample that can be predicted. Compare their ids")
