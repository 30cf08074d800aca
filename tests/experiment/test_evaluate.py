"""`polyfed evaluate`: a saved model on clients, on a file, and on devices, which send nothing but metrics."""

import copy
import csv
import dataclasses
import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

pytest.importorskip("cryptography", reason="the extra polyfed[server] is not installed")

import polyfed
from engines.devices import RECIPE, Devices
from polyfed.cli import main
from polyfed.core.errors import DataError, EgressError, PolyfedError, RecipeError, TooFewReplies
from polyfed.deploy.app_folder import write_job, write_nodes
from polyfed.deploy.handlers import Deployed
from polyfed.evaluation.site_scores import STEPS, Compared, flaw_of_two, site_areas
from polyfed.evaluation.two_models import delong, mcnemar
from polyfed.experiment.evaluate import Evaluation, job_of
from polyfed.experiment.running.assembly import population_of
from polyfed.federation.wire.wire_format import Packet
from polyfed.report.pages.evaluation import notes, tables
from refusals import refuses, warned

WHOLE = RECIPE.replace('holdings = [["a", "b"], ["a"], ["b"]]', "").replace('"scaffold"', '"fedavg"')
POLICY = '[egress."*"]\nserver = ["statistic"]\naccept = ["parameters"]\n[egress.shared]\nserver = ["statistic"]\n'
POLICY += 'accept = ["parameters"]\n'
SHOWN = "[limits]\nmin_group = 1\n"
GROUPS = {"sex": ["f", "m"]}


class Sites(Devices):
    """Three devices whose data has a column of groups, and the app of an evaluation job."""

    def __init__(self, folder: Path, policy: str = "", groups: Mapping[str, Any] = {}, rows: str = "test") -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, WHOLE)
        self.model = folder / "trained"
        polyfed.run(self.recipe, self.model, engine="sequential")
        for k, place in enumerate(self.places):
            with np.load(place / "data.npz") as arrays:
                held = dict(arrays)
            held["sex"] = np.where(np.random.default_rng(k).random(len(held["label"])) < 0.5, "f", "m")
            np.savez(place / "data.npz", **held)
            (place / "policy.toml").write_text(policy or (place / "policy.toml").read_text())
        self.job = job_of(self.model, None, rows, groups)  # type: ignore[arg-type]
        self.app = write_job(self.job, folder / "job")
        self.handler = Deployed(self.app / "recipe.toml")
        self.replies: list[Packet] = []

    def __call__(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        reply = super().__call__(packet, config)
        self.replies.append(reply)
        return reply

    def pooled(self, folder: Path) -> Path:
        """All devices' rows in one file."""
        parts = []
        for place in self.places:
            with np.load(place / "data.npz") as arrays:
                parts.append(dict(arrays))
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        joined["id"] = np.arange(len(joined["label"]))
        joined["client"] = np.repeat(np.arange(len(parts)), [len(part["label"]) for part in parts])
        np.savez(folder / "pooled.npz", **joined)
        return folder / "pooled.npz"


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    allow = '[allow]\ngroups = ["sex"]\n' + SHOWN
    made = Sites(tmp_path_factory.mktemp("sites"), POLICY + allow, GROUPS)
    made.served = made.serve(made.app.parent / "run")  # type: ignore[attr-defined]
    return made


def npz_recipe(sites: Sites, folder: Path) -> Path:
    """The devices' recipe, for a file."""
    text = WHOLE.replace(
        'name = "toy"\nrows = 240\nclasses = 4', 'name = "npz"\npath = "x.npz"\nmodalities = ["a", "b"]'
    )
    (folder / "npz.toml").write_text(text)
    return folder / "npz.toml"


def test_devices_report_what_the_pooled_file_and_scikit_learn_say(sites: Sites, tmp_path: Path) -> None:
    told, path = sites.served["evaluation"], sites.pooled(tmp_path)  # type: ignore[attr-defined]
    here = polyfed.evaluate(sites.model, recipe=npz_recipe(sites, tmp_path), data=path, groups=GROUPS).content
    assert set(told["sites"]) == {"0", "1", "2"}
    assert told["pooled"]["support"] == here["pooled"]["support"]
    assert told["pooled"]["rows"] == here["pooled"]["rows"] == sum(one["rows"] for one in told["sites"].values())
    for name, one in told["pooled"]["metrics"].items():
        for key, value in one.items():
            assert value == pytest.approx(here["pooled"]["metrics"][name][key], rel=1e-12, abs=1e-12), (name, key)
    assert told["pooled"]["groups"] == here["pooled"]["groups"]
    with np.load(path) as arrays:
        tested = arrays["split"] == 1
        y, x = arrays["label"][tested], {m: arrays[m][tested] for m in ("a", "b")}
        sex = arrays["sex"][tested]
    logits = polyfed.load_run(sites.model).predict(x).double()
    share = logits.softmax(-1).numpy()
    right = logits.argmax(-1).numpy() == y
    assert told["pooled"]["metrics"]["accuracy"]["value"] == pytest.approx(right.mean(), abs=1e-9)
    for name, exact in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
        truth = np.mean([exact(y == c, share[:, c]) for c in range(4)])
        one = told["pooled"]["metrics"][name]
        assert abs(one["value"] - truth) <= one["error"] + 1e-12
    for value in "fm":
        group = told["pooled"]["groups"]["sex"][value]
        assert group["rows"] == (sex == value).sum()
        assert group["accuracy"]["value"] == pytest.approx(right[sex == value].mean(), abs=1e-9)


def test_no_row_score_or_label_of_a_device_reaches_the_server(sites: Sites, tmp_path: Path) -> None:
    bodies = b"".join(packet.body for packet in sites.replies)
    headers = json.dumps([packet.header for packet in sites.replies])
    model = polyfed.load_run(sites.model)
    assert len(bodies) > 1000, "the capture holds the replies"
    for place in sites.places:
        with np.load(place / "data.npz") as arrays:
            rows = {name: arrays[name] for name in arrays.files}
        tested = rows["split"] == 1
        logits = model.predict({m: rows[m] for m in ("a", "b")}).numpy()
        for values in (rows["a"], rows["b"], logits):
            for row in values[tested]:
                for number in row:
                    assert np.float32(number).tobytes() not in bodies
                    assert np.float64(number).tobytes() not in bodies
        for kind in (np.int64, np.int32, np.uint8, np.float32, np.float64):
            assert rows["label"][tested].astype(kind).tobytes() not in bodies
        assert str(place) not in headers
    assert {packet.header.get("verdict") for packet in sites.replies} == {"enrolled", "reply", "signed"}
    entries = [json.loads(line) for line in (sites.app.parent / "run" / "egress.jsonl").read_text().splitlines()]
    up = {(row["kind"], row["message"]) for row in entries if row["destination"] == "server"}
    assert up == {("statistic", "SiteScores")}


def test_a_policy_that_allows_evaluation_and_no_training_refuses_the_training(tmp_path: Path) -> None:
    sites = Sites(tmp_path, POLICY + SHOWN)
    assert sites.serve(tmp_path / "run")["evaluation"]["pooled"]["rows"] > 0
    training = sites.app.parent / "app"
    sites.handler, sites.app = Deployed(training / "recipe.toml"), training
    with refuses(EgressError, "send Update.params"):
        sites.serve(tmp_path / "train")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ('[egress."*"]\nserver = ["statistic"]\n', "refused to take"),
        ('[egress.shared]\nserver = ["parameters"]\n', "refused to enrol"),
        ("[limits]\nmax_evaluations_per_day = 0\n", "max_evaluations_per_day"),
        ("[limits]\nmax_requests_per_day = 0\n", "clients enrolled"),
    ],
)
def test_an_evaluation_job_gets_no_more_than_any_other_evaluation(policy: str, words: str, tmp_path: Path) -> None:
    sites = Sites(tmp_path, policy)
    with refuses(PolyfedError, words):
        sites.serve(tmp_path / "run")


def test_few_test_rows_are_not_scored_even_if_a_server_asks_for_them(sites: Sites) -> None:
    from polyfed.privacy.egress.limits import Limits
    from world import on_device

    parts = on_device(job_of(sites.model, None), limits=Limits(min_test_rows=100))
    parts.fed.begin(1)
    with refuses(EgressError, "min_test_rows"):
        parts.algorithm.round(parts.algorithm.init(parts.fed, parts.initial), parts.fed)
    assert parts.ledger.bytes_up == 0


def test_devices_with_too_few_rows_take_no_part_and_the_server_says_so(tmp_path: Path, capsys: Any) -> None:
    sites = Sites(tmp_path, "[limits]\nmin_test_rows = 100\n")
    told = sites.serve(tmp_path / "run")["evaluation"]
    assert set(told["sites"]) == {"server"}
    assert "only the server's rows are scored" in capsys.readouterr().err


def test_a_column_of_groups_needs_the_owners_permission(tmp_path: Path) -> None:
    sites = Sites(tmp_path / "a", POLICY, GROUPS)
    with refuses((EgressError, TooFewReplies), 'groups = ["sex"]'):
        sites.serve(tmp_path / "run")
    other = Sites(tmp_path / "b", POLICY + '[allow]\ngroups = ["a", "id"]\n', {"id": [1]})
    with refuses((EgressError, TooFewReplies), "sample ids"):
        other.serve(tmp_path / "again")


def test_small_classes_and_groups_are_hidden_and_count_nowhere(tmp_path: Path) -> None:
    allow = '[allow]\ngroups = ["sex"]\n[limits]\nmin_group = 4\n'
    sites = Sites(tmp_path, POLICY + allow, GROUPS)
    told = sites.serve(tmp_path / "run")["evaluation"]
    hidden = []
    for k, place in enumerate(sites.places):
        with np.load(place / "data.npz") as arrays:
            y, sex = (arrays[name][arrays["split"] == 1] for name in ("label", "sex"))
        site = told["sites"][str(k)]
        true = np.bincount(y, minlength=4)
        for c, number in enumerate(site["support"]):
            assert number in (0, true[c])
            assert number == 0 or number >= 4
        lost = true.sum() - site["rows"]
        assert lost == 0 or lost >= 4 or site["rows"] == 0
        for value, group in site["groups"]["sex"].items():
            assert group["rows"] == 0 or group["rows"] >= 4
            assert group["rows"] <= (sex == value).sum()
        hidden.append(site["hidden"])
    assert any(hidden)
    assert told["pooled"]["hidden"]


def test_a_model_that_copies_a_feature_into_its_scores_tells_no_bin_of_few_rows(tmp_path: Path) -> None:
    """The server sends weights of its own choice: one logit is a feature, the others are 0."""
    from polyfed.experiment.running.warm_start import given_of, write_text_copy

    for limits, least in (("", 10), ("[limits]\nmin_group = 3\n", 3)):
        sites = Sites(tmp_path / str(least), POLICY + limits)
        weights = {name: torch.zeros_like(value) for name, value in given_of(sites.job, sites.app).items()}
        for name, value in weights.items():
            if name.startswith("a.") and value.dim() == 2:
                value[0, 0] = 5.0
        write_text_copy(weights, sites.app)
        sites.serve(tmp_path / f"run{least}")
        state = polyfed.load_run(tmp_path / f"run{least}").state
        for one in state.sites.values():
            bins = _bins(one.sums)
            assert not ((bins > 0) & (bins < least) & (one.levels[None, :, None] < 9)).any()
            assert int(one.num_rows) in (0, *range(least, 99))
            assert torch.equal(one.shares * STEPS, (one.shares * STEPS).round())


def _bins(sums: torch.Tensor) -> torch.Tensor:
    from polyfed.objective import Classification

    return Classification().score_bins(sums)


@pytest.mark.parametrize("forged", ["groups", "rows", "sums", "shares"])
def test_the_server_drops_an_impossible_report(forged: str, sites: Sites) -> None:
    from polyfed.evaluation.site_scores import SiteScores, flaw_of
    from polyfed.objective import Classification

    objective = Classification()
    sums = objective.site_sums(torch.zeros(5, 3), _labels([0, 1, 2, 1, 0]))
    good = SiteScores(
        sums,
        torch.tensor([[3.0, 1.0], [2.0, 2.0]]).double(),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(2).double(),
        torch.tensor(5),
        torch.tensor(0),
        torch.tensor(0),
    )
    assert flaw_of(objective, good, GROUPS, len(sums)) == ""
    bad = {
        "groups": replace(good, groups=good.groups * 9),
        "shares": replace(good, shares=good.shares[:1]),
        "rows": replace(good, num_rows=torch.tensor(4)),
        "sums": replace(good, sums=sums[:-1]),
    }[forged]
    assert flaw_of(objective, bad, GROUPS, len(sums))


def _labels(y: list[int]) -> Any:
    from polyfed.core.batch import Batch

    return Batch({}, torch.tensor(y), torch.arange(len(y)))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("form", ["run", "model", "file"])
def test_every_form_of_a_model_on_the_clients_of_a_recipe(form: str, engine: str, sites: Sites, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, given = sites.model, None
    if form != "run":
        run, given = polyfed.load_run(sites.model), sites.recipe
        model = tmp_path / "m.safetensors" if form == "file" else run.export(tmp_path / "model")
        if form == "file":
            save_file(dict(run.params), model)
    recipe = polyfed.load_recipe(given or sites.model / "recipe.toml", [f'engine.name="{engine}"'])
    here = polyfed.evaluate(model, recipe=recipe).content
    told = sites.served["evaluation"]  # type: ignore[attr-defined]
    for site, one in here["sites"].items():
        for name, numbers in one["metrics"].items():
            assert numbers["value"] == pytest.approx(told["sites"][site]["metrics"][name]["value"], abs=1e-6)


def test_two_models_are_compared_on_the_same_rows(sites: Sites, tmp_path: Path) -> None:
    polyfed.run(polyfed.load_recipe(sites.recipe, ["rounds=1", "seed=9"]), tmp_path / "weak", engine="sequential")
    recipe = polyfed.load_recipe(npz_recipe(sites, tmp_path))
    both = polyfed.evaluate(sites.model, tmp_path / "weak", recipe=recipe, data=sites.pooled(tmp_path)).content
    found = both["comparison"]
    assert found["rows"] == both["pooled"]["rows"]
    assert set(found["delong"]) == {"0", "1", "2", "3"}
    assert found["bootstrap"]["accuracy"]["first"] == pytest.approx(both["pooled"]["metrics"]["accuracy"]["value"])
    gap = found["mcnemar"]["first_only"] - found["mcnemar"]["second_only"]
    assert gap / found["rows"] == pytest.approx(
        found["bootstrap"]["accuracy"]["first"] - found["bootstrap"]["accuracy"]["second"], abs=1e-6
    )
    same = polyfed.evaluate(sites.model, sites.model, recipe=recipe, data=sites.pooled(tmp_path)).content["comparison"]
    assert same["mcnemar"]["p"] == 1.0
    assert all(test["low"] == test["high"] == 0.0 for test in same["delong"].values())


def test_the_command_prints_json_csv_and_a_table_and_writes_a_page(sites: Sites, tmp_path: Path, capsys: Any) -> None:
    def called(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", str(sites.model), *words])
        out: str = capsys.readouterr().out
        assert ended.value.code == 0
        return out

    content = json.loads(called("--json", "--out", str(tmp_path / "out")))
    lines = list(csv.DictReader(io.StringIO(called("--csv"))))
    assert lines == list(csv.DictReader(io.StringIO((tmp_path / "out" / "evaluation.csv").read_text())))
    first = next(line for line in lines if (line["site"], line["metric"]) == ("pooled", "accuracy"))
    assert float(first["value"]) == content["pooled"]["metrics"]["accuracy"]["value"]
    assert len(lines) == len(Evaluation(content).lines())
    text = called()
    assert "All 38 rows" in text
    assert "95 %" in text
    assert "<table>" in (tmp_path / "out" / "evaluation.html").read_text()
    assert (Path(json.loads(called("--json", "--app", str(tmp_path / "app")))["app"]) / "init.json").exists()


def test_what_is_wrong_is_said_before_anything_runs(sites: Sites, tmp_path: Path) -> None:
    export = polyfed.load_run(sites.model).export(tmp_path / "model")
    with refuses(RecipeError, "clients and rows"):
        polyfed.evaluate(export)
    with refuses(RecipeError, "model.init: fit this model"):
        polyfed.evaluate(export, recipe=polyfed.load_recipe(sites.recipe, ["model.embedding=7"]))
    with refuses(RecipeError, "algorithm.groups: distinct values"):
        polyfed.evaluate(sites.model, groups={"sex": ["f", "f"]})
    with refuses(PolyfedError, "algorithm.groups: no such file"):
        polyfed.evaluate(sites.model, groups=GROUPS)
    none = polyfed.load_recipe(sites.recipe, ["clients.personal_test=0.2"])
    bare = (
        replace(none, clients=replace(none.clients, personal_test=None), data=replace(none.data, test_share=0.0))
        if hasattr(none.data, "test_share")
        else none
    )
    if bare is not none:
        with refuses(RecipeError, "clients.personal_test: nothing to evaluate"):
            polyfed.evaluate(sites.model, recipe=bare)
    with refuses(RecipeError, "clients.personal_test: validation"):
        polyfed.evaluate(sites.model, rows="validation")
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(sites.model), "--group", "sex"])
    assert ended.value.code == 2


def test_groups_are_columns_of_a_table_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows, heads = 120, ["a0", "a1", "b0", "b1", "label", "sex", "ward"]
    label, sex = draw.integers(0, 3, rows), draw.choice(["f", "m"], rows)
    x = draw.normal(size=(rows, 4)) + label[:, None]
    table = np.column_stack([x.round(3).astype(str), label.astype(str), sex, draw.choice(["01", "1"], rows)])
    (tmp_path / "t.csv").write_text("\n".join(map(",".join, [heads, *table.tolist()])) + "\n")
    made = polyfed.parse_recipe(
        {
            "data": {"name": "table", "path": str(tmp_path / "t.csv"), "modalities": {"a": "a*", "b": "b*"}},
            "clients": {"num": 3, "personal_test": 0.3},
            "algorithm": {"name": "fedavg"},
            "rounds": 1,
        }
    )
    polyfed.run(made, tmp_path / "run")
    found = polyfed.evaluate(tmp_path / "run", data=tmp_path / "t.csv", groups={"sex": ["f", "m"], "ward": ["01", "1"]})
    logits = polyfed.load_run(tmp_path / "run").predict({"a": x[:, :2].round(3), "b": x[:, 2:].round(3)})
    right = logits.argmax(1).numpy() == label
    for column, values in (("sex", sex), ("ward", table[:, -1])):
        for value, told in found.content["pooled"]["groups"][column].items():
            assert told["rows"] == (values == value).sum(), "words stay words: 01 is not 1"
            assert told["accuracy"]["value"] == pytest.approx(right[values == value].mean())
    assert polyfed.evaluate(tmp_path / "run", groups={"sex": ["f", "m"]}).content["pooled"]["groups"]["sex"]
    with refuses(DataError, "algorithm.groups: array"):
        polyfed.evaluate(tmp_path / "run", groups={"sexx": ["f"]})


@pytest.mark.filterwarnings("ignore::polyfed.core.errors.PolyfedWarning")
def test_groups_that_differ_by_blanks_are_told_and_relabel_joins_them(tmp_path: Path) -> None:
    words = ["f", "m", "f ", "m"]
    lines = [f"{i % 7}.5,{i % 3}.2,{i % 2},{words[i % 4]}" for i in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label,sex", *lines, ""]))
    data = {"name": "table", "path": str(tmp_path / "t.csv"), "modalities": {"a": "a", "b": "b"}}
    table: dict[str, Any] = {"data": data, "clients": {"num": 2}, "algorithm": {"name": "fedavg"}, "rounds": 1}
    polyfed.run(polyfed.parse_recipe(table), tmp_path / "run")
    with warned("relabel.sex = {"):
        found = polyfed.evaluate(tmp_path / "run", data=tmp_path / "t.csv", groups={"sex": []})
    assert set(found.content["pooled"]["groups"]["sex"]) == {"f", "f ", "m"}
    table["data"] = data | {"relabel": {"sex": {"f ": "f"}}}
    polyfed.run(polyfed.parse_recipe(table), tmp_path / "joined")
    for rows in (None, tmp_path / "t.csv"):
        told = polyfed.evaluate(tmp_path / "joined", data=rows, groups={"sex": []}).content["pooled"]["groups"]["sex"]
        assert set(told) == {"f", "m"}
    assert {told[sex]["rows"] for sex in told} == {40}


# a table with names, holes and natural clients


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table with words for classes and clients, in which rows lack a modality."""
    folder = tmp_path_factory.mktemp("homes")
    table(folder / "my.csv", 400, 0)
    table(folder / "new.csv", 300, 1)
    recipe = f"""rounds = 2
[data]
name = "table"
path = "{folder / "my.csv"}"
modalities = {{ audio = "audio_*", text = "text_*" }}
[clients]
partition = "by-client"
validation = 0.1
[algorithm]
name = "fedavg"
[train]
lr = 0.1
"""
    (folder / "recipe.toml").write_text(recipe)
    polyfed.run(folder / "recipe.toml", folder / "run")
    return folder


def table(path: Path, rows: int, seed: int, without: str = "", short: bool = False) -> Path:
    draw = np.random.default_rng(seed)
    label, home = draw.integers(0, 3, rows), draw.integers(0, 6, rows)
    x = draw.normal(size=(rows, 8)) + 1.5 * label[:, None]
    lacks = draw.random(rows)
    heads = [f"{m}_{k}" for m in ("audio", "text") for k in range(4)]
    lines = [",".join([*heads, "label", "client", "kind"])]
    for place in range(rows):
        cells = [f"{v:.3f}" for v in x[place]]
        if lacks[place] < 0.3:
            cells[:4] = [""] * 4
        elif lacks[place] > 0.8 and not without:
            cells[4:] = [""] * 4
        cells += [("bad", "good", "so-so")[label[place]], f"home{home[place] + 5}", ("x", "y", "")[place % 3]]
        lines.append(",".join(cells))
    kept = [k for k, head in enumerate((*heads, *"abc")) if not (without and head.startswith(without))]
    kept = [k for k in kept if not (short and k == 7)]
    text = [",".join(line.split(",")[k] for k in kept) for line in lines]
    path.write_text("\n".join(text))
    return path


def test_sites_classes_and_groups_have_the_names_of_the_table(homes: Path) -> None:
    found = polyfed.evaluate(homes / "run", data=homes / "new.csv", groups={"kind": []}).content
    assert set(found["sites"]) == {f"home{k}" for k in range(5, 11)}
    assert sum(one["rows"] for one in found["sites"].values()) == found["pooled"]["rows"] == 300
    assert found["classes"] == ["bad", "good", "so-so"]
    assert set(found["pooled"]["groups"]["kind"]) == {"x", "y"}
    lacks = found["pooled"]["groups"]["missing"]
    assert sum(one["rows"] for one in lacks.values()) == 300
    assert lacks["nothing"]["accuracy"]["value"] > lacks["audio"]["accuracy"]["value"]
    told = found["pooled"]["metrics"]["accuracy"]
    assert told["clients"] == 6
    assert told["low_by_rows"] < told["value"] < told["high_by_rows"]


@pytest.mark.parametrize("form", ["no column", "all empty"])
def test_a_file_without_a_modality_answers_how_good_the_model_is_without_it(
    form: str, homes: Path, tmp_path: Path
) -> None:
    path = table(tmp_path / "silent.csv", 300, 1, "audio")
    if form == "all empty":
        head, *lines = path.read_text().splitlines()
        extra = ",".join(f"audio_{k}" for k in range(4))
        path.write_text("\n".join([f"{head},{extra}", *(line + "," * 4 for line in lines)]))
    found = polyfed.evaluate(homes / "run", data=path).content["pooled"]
    assert found["rows"] == 300
    with open(path) as file:
        rows = list(csv.DictReader(file))
    text = np.array([[float(row[f"text_{k}"] or "nan") for k in range(4)] for row in rows])
    run = polyfed.load_run(homes / "run")
    right = [
        run.models.class_names[int(k)] == row["label"]
        for k, row in zip(run.predict({"text": text}).argmax(1), rows, strict=True)
    ]
    assert found["metrics"]["accuracy"]["value"] == pytest.approx(np.mean(right))
    assert set(found["groups"]["missing"]) == {"audio"}


def test_a_missing_column_is_named(homes: Path, tmp_path: Path) -> None:
    with refuses(DataError, "column 'text_3'"):
        polyfed.evaluate(homes / "run", data=table(tmp_path / "short.csv", 300, 1, short=True))


def test_the_best_round_is_scored_only_if_asked(homes: Path) -> None:
    run = polyfed.load_run(homes / "run")
    last, best = (polyfed.evaluate(homes / "run", data=homes / "new.csv", best=flag).content for flag in (False, True))
    assert last["model"]["round"] == 2
    assert best["model"]["round"] == last["model"]["best_round"] == run.result["best"]["round"]
    same = run.result["best"]["round"] == 2
    assert (last["pooled"]["metrics"]["loss"] == best["pooled"]["metrics"]["loss"]) == same


def test_what_the_recipe_switches_on_itself_is_not_called_idle(homes: Path, tmp_path: Path) -> None:
    recipe = (homes / "recipe.toml").read_text().replace("validation = 0.1", "personal_validation = 0.2")
    (tmp_path / "recipe.toml").write_text(recipe)
    polyfed.run(tmp_path / "recipe.toml", tmp_path / "run")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        polyfed.evaluate(tmp_path / "run", data=homes / "new.csv")
    assert [str(one.message) for one in told if "own_validation" in str(one.message)] == []


def ended(*words: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def test_the_terminal_names_everything_once(homes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(homes / "run"), "--data", str(homes / "new.csv"), "--out", str(tmp_path / "out")]
    assert ended(*arguments, "--group", "kind") == 0
    text = capsys.readouterr().out
    assert "home10" in text
    assert "so-so" in text
    assert "by what a row lacks" in text
    assert "100 rows, not scored apart" in text
    assert "server" not in text
    assert "min_group" not in text
    assert "that of round 2" in text
    assert "over 6 clients" in text
    other = tmp_path / "other"
    polyfed.load_run(homes / "run").export(other)
    again = ["evaluate", str(other), "--recipe", str(homes / "recipe.toml"), "--data", str(homes / "new.csv")]
    assert ended(*again, "--out", str(tmp_path / "out")) == 2
    assert "holds the evaluation of" in capsys.readouterr().err


def test_two_models_are_named_and_compared_over_clients(homes: Path) -> None:
    found = polyfed.evaluate(homes / "run", homes / "run", data=homes / "new.csv").content["comparison"]
    assert found["models"] == [str(homes / "run")] * 2
    assert found["clients"] == 6
    assert set(found["delong"]) == {"bad", "good", "so-so"}


def second_job(sites: Sites, folder: Path) -> tuple[Sites, Path]:
    """The same devices with a job that compares two models, and the second model."""
    other = folder / "other"
    polyfed.run(polyfed.load_recipe(sites.recipe, ["rounds=1", "train.lr=0.2"]), other, engine="sequential")
    two = copy.copy(sites)
    two.app = write_job(job_of(sites.model, None, against=other), folder / "job")
    two.handler, two.replies = Deployed(two.app / "recipe.toml"), []
    return two, other


def test_devices_compare_two_models_by_counts_alone(sites: Sites, tmp_path: Path, capsys: Any) -> None:
    two, other = second_job(sites, tmp_path)
    found = two.serve(tmp_path / "run")
    told = found["evaluation"]["comparison"]
    with np.load(sites.pooled(tmp_path)) as arrays:
        tested = arrays["split"] == 1
        x, y, site = {m: arrays[m][tested] for m in "ab"}, arrays["label"][tested], arrays["client"][tested]
    right = [polyfed.load_run(path).predict(x).argmax(1).numpy() == y for path in (sites.model, other)]
    assert told["mcnemar"] == dataclasses.asdict(mcnemar(right[0], right[1], site))
    assert (told["rows"], told["clients"]) == (len(y), 3)
    for k in range(3):
        one, own = told["by_site"][str(k)], [answers[site == k] for answers in right]
        assert (one["first"], one["second"]) == (pytest.approx(own[0].mean()), pytest.approx(own[1].mean()))
        assert one["p"] == pytest.approx(mcnemar(own[0], own[1]).p)
        assert one["low"] <= one["first"] - one["second"] <= one["high"]
    scores = [polyfed.load_run(path).predict(x).double().softmax(-1).numpy() for path in (sites.model, other)]
    for c in range(4):
        first, second, variance, rows = within(y, site, scores, c)
        test = told["delong_within_sites"][str(c)]
        assert (test["first"], test["second"]) == (pytest.approx(first, abs=1e-9), pytest.approx(second, abs=1e-9))
        assert (test["high"] - test["low"]) / 2 == pytest.approx(1.959963984540054 * variance**0.5, abs=1e-9)
        assert (test["rows"], test["low"] <= test["first"] - test["second"] <= test["high"]) == (rows, True)
    assert {name: one["metrics"] for name, one in found["evaluation"]["sites"].items()} == {
        name: one["metrics"]
        for name, one in sites.served["evaluation"]["sites"].items()  # type: ignore[attr-defined]
    }
    entries = [json.loads(line) for line in (tmp_path / "run" / "egress.jsonl").read_text().splitlines()]
    up = {(row["kind"], row["message"]) for row in entries if row["destination"] == "server"}
    assert up == {("statistic", "SiteScores"), ("statistic", "Compared")}
    text = "".join(f"{line}" for _, _, lines in tables(found["evaluation"]) for line in lines)
    assert "accuracy at 2" in text
    assert "within 3 sites, DeLong" in text
    assert any("which no device sends" in note for note in notes(found["evaluation"]))
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(sites.model), str(other), "--app", str(tmp_path / "third")])
    assert ended.value.code == 0, capsys.readouterr().err
    assert polyfed.load_recipe(tmp_path / "third" / "recipe.toml").algorithm.against == str(other)


def within(y: np.ndarray, site: np.ndarray, scores: list[np.ndarray], c: int) -> tuple[float, float, float, int]:
    """AUROCs of class c of two models within sites, their variance and rows, from DeLong's test of each site."""
    found = []
    for k in np.unique(site):
        own = site == k
        test = delong(y[own] == c, scores[0][own, c], scores[1][own, c])
        if test is not None:
            deviation = (test.high - test.low) / 2 / 1.959963984540054
            found.append((own.sum(), test.first, test.second, deviation**2))
    n, first, second, variance = np.array(found).T
    return (n @ first / n.sum(), n @ second / n.sum(), n**2 @ variance / n.sum() ** 2, int(n.sum()))


@pytest.mark.parametrize(
    "changed",
    [
        {"cells": [3, 1, 1, 1]},
        {"cells": [2, 2, 2, -1]},
        {"cells": [5, 0, 0, 1]},
        {"areas": [[6.0, 0.5, 0.5, 0.1]]},
        {"areas": [[5.0, 1.5, 0.5, 0.1]]},
        {"areas": [[5.0, 0.5, 0.5, 9.0]]},
        {"areas": [[5.0, 0.5, 0.5, 0.1]] * 2},
        {"gaps": []},
        {"gaps": [[6.0, *[2.0] * 12]]},
        {"gaps": [[5.0, 5.0, 9.0, 1.0, *[1.0] * 9]]},
    ],
)
def test_a_report_on_two_models_counts_the_rows_that_the_site_has(changed: dict[str, Any]) -> None:
    from polyfed.objective import Classification

    good: dict[str, Any] = {"cells": [2, 1, 1, 1], "areas": [[5.0, 0.5, 0.5, 0.1]], "gaps": [[5.0, *[2.0] * 12]]}
    for said, flawed in ((good, False), (good | changed, True)):
        areas, gaps = (torch.tensor(said[name], dtype=torch.float64).view(-1, n) for name, n in WIDE.items())
        reply = Compared(torch.tensor(said["cells"]), areas, gaps)
        assert bool(flaw_of_two(Classification(), reply, 5.0, 1, 1)) == flawed


WIDE = {"areas": 4, "gaps": 13}


def test_few_rows_of_a_class_give_no_auroc_and_no_digits_of_a_variance() -> None:
    from polyfed.objective import Classification, MultiLabel

    draw = torch.Generator().manual_seed(0)
    y = torch.tensor([0] * 12 + [1] * 11 + [2] * 9)
    one, two = (torch.randn(32, 3, generator=draw) + torch.nn.functional.one_hot(y, 3) for _ in range(2))
    open_, kept = (site_areas(Classification(), [one, two], y, least) for least in (1, 10))
    assert (open_[:, 0] == 32).all()
    assert kept[:, 0].tolist() == [32, 32, 0]
    assert torch.equal(kept[:2, :3], open_[:2, :3])
    steps = STEPS * kept[:2, 3].log2()
    assert torch.allclose(steps, steps.round(), atol=1e-9)
    assert ((kept[:2, 3] >= open_[:2, 3]) & (kept[:2, 3] < 1.1 * open_[:2, 3])).all()
    labels = torch.stack([y == 0, y == 1], 1).double()
    labels[:5, 1] = torch.nan
    found = site_areas(MultiLabel(), [one[:, :2], two[:, :2]], labels, 10)
    assert found[:, 0].tolist() == [32, 27]
    known = slice(5, None)
    test = delong(*(v[known, 1].numpy() for v in (labels == 1, one.double(), two.double())))
    assert test is not None
    assert found[1, 1:3].tolist() == pytest.approx([test.first, test.second])


def test_two_models_that_cannot_be_compared_on_devices_are_refused(sites: Sites, tmp_path: Path) -> None:
    other = tmp_path / "other"
    polyfed.run(polyfed.load_recipe(sites.recipe, ["model.embedding=5", "rounds=1"]), other, engine="sequential")
    with refuses(RecipeError, "model.init: does not fit"):
        polyfed.check(job_of(sites.model, None, against=other))


OWN_ARRAYS = """
seed = 4
rounds = 1
[data]
name = "npz"
path = "{}"
modalities = {}
test_share = 0.0
[clients]
num = 2
partition = "iid"
personal_test = 0.3
[algorithm]
name = "fedavg"
"""


@pytest.mark.filterwarnings("ignore:.*features differ in size")
@pytest.mark.parametrize("modalities", ['["a", "b"]', '{ a = "a", b = ["c", "d"] }'])
@pytest.mark.parametrize("standardise", ["uneven", True])
def test_the_file_of_one_client_is_scored_as_in_the_simulation(
    modalities: str, standardise: Any, tmp_path: Path
) -> None:
    draw, y = np.random.default_rng(0), np.arange(160) % 2
    wide = draw.normal(size=(160, 4)) * [100, 1, 1e-3, 5] + y[:, None] * [60, 0.5, 5e-4, 2] + 500
    arrays = {"a": wide, "b": wide[:, :2], "c": wide[:, 2], "d": wide[:, 3], "label": y}
    np.savez(tmp_path / "mine.npz", **arrays)
    (tmp_path / "recipe.toml").write_text(OWN_ARRAYS.format(tmp_path / "mine.npz", modalities))
    recipe = polyfed.load_recipe(tmp_path / "recipe.toml", [f"data.standardise={json.dumps(standardise)}"])
    polyfed.run(recipe, tmp_path / "run", engine="sequential")
    sites = polyfed.evaluate(tmp_path / "run").content["sites"]
    for client, place in enumerate(write_nodes(recipe, tmp_path)):
        alone = polyfed.evaluate(tmp_path / "run", data=place / "data.npz").content["pooled"]
        assert alone["rows"] == sites[str(client)]["rows"]
        assert alone["metrics"] == sites[str(client)]["metrics"]
        shown = population_of(replace(recipe, data=replace(recipe.data, path=str(place / "data.npz"))))  # type: ignore[type-var]
        rows = torch.arange(len(shown.columns))
        assert float(shown.columns.modalities["a"].take(rows).abs().max()) < 6, "a device scales its file once"


def test_the_files_of_single_clients_hold_the_words_and_holes_of_the_file(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    age, sex = draw.normal(size=60), np.array(["f", "m", "x"])[draw.integers(0, 3, 60)]
    age[::9] = np.nan
    np.savez(tmp_path / "mine.npz", a=draw.normal(size=(60, 2)), age=age, sex=sex, label=np.arange(60) % 2)
    columns = '["a", "age", "sex"]\ncolumns = { sex = "one-hot", age = "mean" }'
    (tmp_path / "recipe.toml").write_text(OWN_ARRAYS.format(tmp_path / "mine.npz", columns))
    recipe = polyfed.load_recipe(tmp_path / "recipe.toml")
    polyfed.run(recipe, tmp_path / "run", engine="sequential")
    sites, population = polyfed.evaluate(tmp_path / "run").content["sites"], population_of(recipe)
    for client, place in enumerate(write_nodes(recipe, tmp_path)):
        assert population.test is not None
        rows = torch.cat([population.train[client], population.test[client]]).numpy()
        with np.load(place / "data.npz") as arrays:
            assert arrays["sex"].tolist() == sex[rows].tolist()
            np.testing.assert_array_equal(arrays["age"], age[rows])
        alone = polyfed.evaluate(tmp_path / "run", data=place / "data.npz").content["pooled"]
        assert alone["metrics"] == sites[str(client)]["metrics"]


def test_names_of_image_files_are_not_copied_into_the_files_of_clients(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra polyfed[image] is not installed")
    for k in range(4):
        image.new("RGB", (4, 4), (60 * k, 0, 0)).save(tmp_path / f"{k}.png")
    names = np.array([f"{k % 4}.png" for k in range(20)])
    np.savez(tmp_path / "mine.npz", a=np.ones((20, 2)), seen=names, label=np.arange(20) % 2)
    text = OWN_ARRAYS.format(tmp_path / "mine.npz", '["a", "seen"]\ncolumns = { seen = "image" }')
    (tmp_path / "recipe.toml").write_text(text)
    with refuses(RecipeError, "data.columns: image files"):
        write_nodes(polyfed.load_recipe(tmp_path / "recipe.toml"), tmp_path)


def test_a_stated_scaling_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", a=np.eye(20), a_shift=np.zeros(3), a_scale=np.ones(20), label=np.arange(20) % 2)
    (tmp_path / "recipe.toml").write_text(OWN_ARRAYS.format(tmp_path / "mine.npz", '["a"]'))
    with refuses(DataError, "a_shift and a_scale"):
        population_of(polyfed.load_recipe(tmp_path / "recipe.toml"))


def test_the_c_index_is_that_of_the_pairs_within_sites(tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(0), 90
    y, site = draw.normal(size=rows).round(1), np.arange(rows) % 3
    x = (y[:, None] + 3 * site[:, None] + draw.normal(size=(rows, 2))).astype(np.float32)
    np.savez(tmp_path / "d.npz", a=x, label=y, client=site)
    options: dict[str, Any] = {
        "clients": {"personal_test": 0.5},
        "task": {"name": "regression"},
        "seed": 1,
        "rounds": 1,
    }
    polyfed.run(polyfed.make_recipe(tmp_path / "d.npz", standardise=False, **options), tmp_path / "run")
    found = polyfed.evaluate(tmp_path / "run", data=tmp_path / "d.npz").content
    p = polyfed.load_run(tmp_path / "run").predict({"a": x}).numpy()[:, 0]
    right, pairs = np.zeros(3), np.zeros(3)
    for k in range(3):
        own = site == k
        gap, order = y[own][:, None] - y[own], p[own][:, None] - p[own]
        pairs[k] = (gap != 0).sum()
        right[k] = (gap * order > 0).sum() + 0.5 * ((order == 0) & (gap != 0)).sum()
        told = found["sites"][str(k)]["metrics"]["c_index_within_sites"]
        assert told["value"] == pytest.approx(right[k] / pairs[k], abs=1e-12)
        assert told["low"] < told["value"] < told["high"]
    told = found["pooled"]["metrics"]["c_index_within_sites"]
    assert told["value"] == pytest.approx(right.sum() / pairs.sum(), abs=1e-12)
    assert told["clients"] == 3
    assert any("no rows of two sites" in note for note in notes(found))
