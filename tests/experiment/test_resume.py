"""Nothing is lost: kills, resumes, damaged and foreign checkpoints, full disks, Ctrl-C."""

import contextlib
import json
import multiprocessing
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.core import keys
from polyfed.core.errors import CheckpointError, DataError, EgressError, PolyfedError, RecipeError
from polyfed.core.system import files as run_files
from polyfed.data.sources import Toy
from polyfed.engines.protocol import RUN_NAME
from polyfed.experiment.recipes.recipe import CheckpointSpec, Recipe
from polyfed.experiment.recipes.settings import EngineSpec
from polyfed.experiment.results import records
from polyfed.experiment.results.records import Records, run_id
from polyfed.experiment.running import checkpoint
from polyfed.experiment.running.assembly import assemble
from polyfed.experiment.running.events import Emitter
from polyfed.experiment.running.lock import LOCK
from polyfed.experiment.running.loop import execute
from polyfed.objective import CLASSES
from polyfed.selection import Uniform
from polyfed.training.optimisers import Train
from refusals import refuses
from world import AWKWARD, algorithm, recipe


def longer(name: str = "moon", rounds: int = 40, **options: Any) -> Recipe:
    """A run with local state, dropout, BatchNorm and a server optimiser."""
    return replace(recipe(algorithm(name, **options), "vectorised", AWKWARD), rounds=rounds)


def files(folder: Path) -> dict[str, Any]:
    """What a run left: rounds without timings, ledger without the run's id, the state's digest."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "egress.jsonl").read_text().splitlines()]
    for row in rounds:
        row.pop("seconds")
    for row in ledger:
        row.pop("run")
    result = json.loads((folder / "result.json").read_text())
    return {
        "rounds": rounds,
        "ledger": ledger,
        "sha": result["state_sha256"],
        "bytes": (result["bytes_up"], result["bytes_down"]),
    }


def _child(folder: str) -> None:
    polyfed.run(longer(), folder, resume=True)


def stopped(folder: Path, after: int, made: Recipe, **options: Any) -> None:
    """A run that is interrupted after a round."""

    def stop(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polyfed.run(made, folder, listeners=[stop], **options)


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_killed_before_its_recipe_was_noted_begins_anew(tmp_path: Path) -> None:
    made = longer(rounds=1)
    whole = polyfed.run(made, tmp_path / "whole").result
    (tmp_path / "hurt").mkdir()
    (tmp_path / "hurt" / "run.json").write_text((tmp_path / "whole" / "run.json").read_text())
    assert polyfed.run(made, tmp_path / "hurt", resume=True).result["state_sha256"] == whole["state_sha256"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(kills: int, tmp_path: Path) -> None:
    started = time.perf_counter()
    polyfed.run(longer(), tmp_path / "whole")
    whole_s = time.perf_counter() - started
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["polyfed", "world"])
    killed = 0
    delays = keys.uniform(keys.key("kills"), 400).tolist()
    while killed < kills:
        child = context.Process(target=_child, args=(str(tmp_path / "hurt"),))
        child.start()
        child.join(timeout=0.02 + delays[killed] * whole_s / 4)
        if child.is_alive():
            child.kill()
            killed += 1
        elif killed < kills:  # it got to the end: start over, the kills go on
            child.join()
            assert child.exitcode == 0
            assert files(tmp_path / "hurt") == files(tmp_path / "whole")
            (tmp_path / "hurt").rename(tmp_path / f"done-{killed}")
        child.join()
        child.close()
    polyfed.run(longer(), tmp_path / "hurt", resume=True)
    assert files(tmp_path / "hurt") == files(tmp_path / "whole")


def test_ctrl_c_stops_and_can_be_resumed(tmp_path: Path) -> None:
    def interrupt(event: str, **facts: Any) -> None:
        if event == "round-started" and facts["round"] == 5:
            raise KeyboardInterrupt

    made = longer(rounds=8)
    whole = polyfed.run(made, tmp_path / "whole")
    with contextlib.suppress(KeyboardInterrupt):
        polyfed.run(made, tmp_path / "hurt", listeners=[interrupt])
    assert polyfed.run(made, tmp_path / "hurt", resume=True).result["state_sha256"] == whole.result["state_sha256"]


def test_a_finished_run_can_be_given_more_rounds(tmp_path: Path) -> None:
    made = longer("fedavg", rounds=6)
    polyfed.run(replace(made, rounds=4), tmp_path / "run")
    more = polyfed.run(made, tmp_path / "run", resume=True)
    assert more.result["state_sha256"] == polyfed.run(made).result["state_sha256"]


def test_fewer_rounds_than_played_are_refused_and_change_nothing(tmp_path: Path) -> None:
    polyfed.run(longer("fedavg", rounds=4), tmp_path)
    before = files(tmp_path), (tmp_path / "recipe.toml").read_bytes()
    with refuses(RecipeError, "recipe says rounds"):
        polyfed.run(longer("fedavg", rounds=2), tmp_path, resume=True)
    assert before == (files(tmp_path), (tmp_path / "recipe.toml").read_bytes())


def test_more_rounds_are_refused_where_the_learning_rate_runs_over_all_of_them(tmp_path: Path) -> None:
    falling = Train(lr=0.1, lr_end=0.01, lr_schedule="cosine", batch_size=16)
    polyfed.run(longer("fedavg", rounds=2, train=falling), tmp_path)
    with refuses(RecipeError, "spreads"):
        polyfed.run(longer("fedavg", rounds=4, train=falling), tmp_path, resume=True)


def test_going_on_with_nothing_says_that_it_begins(tmp_path: Path) -> None:
    notes: list[str] = []
    listener = lambda event, **facts: notes.append(facts["text"]) if event == "note" else None  # noqa: E731
    polyfed.run(longer("fedavg", rounds=1), tmp_path / "new", resume=True, listeners=[listener])
    assert notes == [f"{tmp_path / 'new'} has no checkpoint to resume from: the run starts at round 1"]


def test_what_crossed_in_a_round_that_failed_is_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first client's reply has left when the second is refused; nothing of that may be missing from the file."""
    policy: dict[str, dict[str, list[str]]] = {"b": {"server": []}}
    made = replace(longer("fedavg", rounds=1), engine=EngineSpec(name="sequential"), egress=policy)
    clients = assemble(made).fed.clients
    holders = [client for client in clients if "b" in clients[client].modalities]
    monkeypatch.setattr("polyfed.experiment.running.loop.check_before_run", lambda assembly: None)
    with pytest.raises(EgressError):
        execute(made, Records(tmp_path, resume=False), Emitter())
    rows = [json.loads(line) for line in (tmp_path / "egress.jsonl").read_text().splitlines()]
    sent = {row["client"] for row in rows if row["destination"] == "client"}
    assert sent, "the round had begun"
    assert {row["client"] for row in rows if row["verdict"] == "refused"} <= set(holders)
    assert any(row["verdict"] == "refused" for row in rows)


def test_rounds_since_a_sparse_checkpoint_are_played_again(tmp_path: Path) -> None:
    made = replace(longer("fedavg", rounds=7), checkpoint=CheckpointSpec(every=3))

    def stop(event: str, **facts: Any) -> None:
        if event == "round-finished" and facts["row"]["round"] == 5:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        polyfed.run(made, tmp_path / "run", listeners=[stop])
    polyfed.run(made, tmp_path / "run", resume=True)
    polyfed.run(made, tmp_path / "whole")
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@dataclass(frozen=True)
class Memory:
    """Of a selector of the user's own."""

    turns: int = 0


@dataclass(frozen=True, kw_only=True)
class Turns(Uniform):
    """One client after the other."""

    def start(self, params: Any) -> Any:
        return Memory()

    def choose(self, memory: Any, params: Any, fed: Any) -> Any:
        return [memory.turns % len(fed.clients)], Memory(memory.turns + 1)


def test_memory_of_a_selector_of_ones_own_is_kept(tmp_path: Path) -> None:
    made = recipe(algorithm("fedavg", selector=Turns()))
    polyfed.run(replace(made, rounds=2), tmp_path / "run")
    polyfed.run(replace(made, rounds=4), tmp_path / "run", resume=True)
    assert [row["cohort"] for row in files(tmp_path / "run")["rounds"]] == [[0], [1], [2], [3]]


def test_lines_are_on_the_disk_before_a_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    real = records.sync
    monkeypatch.setattr(records, "sync", lambda path: (synced.append((path.name, path.stat().st_size)), real(path)))
    polyfed.run(longer(rounds=2), tmp_path / "run")
    for name in (run_files.ROUNDS, run_files.EGRESS):
        assert (name, (tmp_path / "run" / name).stat().st_size) in synced


@pytest.mark.parametrize(("first", "then"), [("sequential", "flower"), ("flower", "vectorised")])
def test_what_clients_keep_is_not_lost_by_another_engine(first: str, then: str, tmp_path: Path) -> None:
    made = recipe(algorithm("scaffold"), first, task=CLASSES)
    folder = Records(tmp_path / "run", resume=False)
    folder.note(made.table(), {"run": "one"})
    folder.checkpoints.mkdir()
    other = recipe(algorithm("scaffold"), then, task=CLASSES)
    with refuses(RecipeError, f"on engine '{first}'"):
        Records(tmp_path / "run", resume=True).check(other.table(), {"run": "two", "started": "now"})


def test_a_folder_with_another_run_is_not_overwritten(tmp_path: Path) -> None:
    polyfed.run(longer("fedavg", rounds=1), tmp_path)
    before = everything(tmp_path)
    with refuses(RecipeError, "rounds=2"):
        polyfed.run(longer("fedavg", rounds=2), tmp_path)
    with refuses(RecipeError, "another recipe"):
        polyfed.run(replace(longer("fedavg", rounds=1), seed=77), tmp_path)
    assert before == everything(tmp_path)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with refuses(RecipeError, "holds no run"):
        polyfed.run(longer("fedavg", rounds=1), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_resuming_with_another_recipe_names_the_difference(tmp_path: Path) -> None:
    polyfed.run(longer("fedavg", rounds=1), tmp_path)
    with refuses(RecipeError, "recipe says 2"):
        polyfed.run(replace(longer("fedavg", rounds=2), seed=2), tmp_path, resume=True)


@pytest.mark.parametrize(("option", "other"), [("momentum", 0.5), ("clip_norm", 1.0)])
def test_a_run_of_a_release_that_lacked_an_option_goes_on_with_its_default(
    option: str, other: float, tmp_path: Path
) -> None:
    made, line = longer("fedavg", rounds=2), f"{option} = 0.0\n"
    polyfed.run(replace(made, rounds=1), tmp_path)
    path = tmp_path / "recipe.toml"
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, ""))
    with refuses(RecipeError, "resume=True"):
        polyfed.run(made, tmp_path)
    changed = replace(made.algorithm, train=replace(made.algorithm.train, **{option: other}))  # type: ignore[attr-defined]
    with refuses(RecipeError, f"train.{option} = None"):
        polyfed.run(replace(made, algorithm=changed), tmp_path, resume=True)
    polyfed.run(made, tmp_path, resume=True)
    assert line in path.read_text()


@pytest.mark.parametrize("victim", ["state.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_told_by_name(tmp_path: Path, victim: str) -> None:
    polyfed.run(longer("fedavg", rounds=1), tmp_path)
    (path,) = tmp_path.rglob(victim)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with refuses(CheckpointError, f"{victim} is damaged"):
        polyfed.run(longer("fedavg", rounds=2), tmp_path, resume=True)


def test_a_torn_line_after_the_checkpoint_is_cut_away(tmp_path: Path) -> None:
    made = longer("fedavg", rounds=4)
    polyfed.run(replace(made, rounds=2), tmp_path / "run")
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "coho')
    polyfed.run(made, tmp_path / "run", resume=True)
    polyfed.run(made, tmp_path / "whole")
    torn, whole = (files(tmp_path / name)["rounds"] for name in ("run", "whole"))
    assert [row["round"] for row in torn] == [1, 2, 3, 4]
    assert torn[2:] == whole[2:]


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = longer("fedavg", rounds=4)
    whole = polyfed.run(made, tmp_path / "whole")
    original = checkpoint.save_file

    def full(tensors: Any, path: Path) -> None:
        if "round-000003" in str(path):
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with refuses(CheckpointError, "untouched"):
        polyfed.run(made, tmp_path / "run")
    monkeypatch.undo()
    assert polyfed.run(made, tmp_path / "run", resume=True).result["state_sha256"] == whole.result["state_sha256"]


def test_a_checkpoint_names_no_class_outside_polyfed_and_the_algorithms_module(tmp_path: Path) -> None:
    polyfed.run(longer("fedavg", rounds=1), tmp_path)
    (path,) = tmp_path.rglob("state.json")
    path.write_text(path.read_text().replace("polyfed.algorithms.averaging.template:State", "subprocess:Popen"))
    latest = json.loads((tmp_path / "checkpoint" / "latest.json").read_text())
    latest["sha256"]["state.json"] = checkpoint.sha256_of(path)
    (tmp_path / "checkpoint" / "latest.json").write_text(json.dumps(latest))
    with refuses(CheckpointError, "subprocess:Popen"):
        polyfed.run(longer("fedavg", rounds=2), tmp_path, resume=True)


def test_an_output_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(PolyfedError, "--out"):
        polyfed.run(longer("fedavg", rounds=1), tmp_path / "file" / "run")


def test_a_resolved_recipe_can_be_run_again_as_it_is(tmp_path: Path) -> None:
    made = polyfed.load_recipe(Path(__file__).parents[2] / "recipes" / "fedavg-cg-digits.toml", ["rounds=2"])
    first = polyfed.run(made, tmp_path / "first")
    assert (tmp_path / "first" / "report.html").exists()
    again = polyfed.run(tmp_path / "first" / "recipe.toml", tmp_path / "second")
    assert again.result["state_sha256"] == first.result["state_sha256"]


def test_an_engine_of_another_name_is_an_error_of_ours() -> None:
    with refuses(RecipeError, "mean 'vectorised'"):
        polyfed.run(longer("fedavg", rounds=1), engine="vectorized")


def test_the_files_of_a_run_are_strict_json(tmp_path: Path) -> None:
    polyfed.run(longer("fedavg", rounds=0), tmp_path)  # no round: the loss of the last cohort is not a number

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)


def test_a_run_refused_at_its_start_leaves_its_folder_free(tmp_path: Path) -> None:
    made = recipe(algorithm("cmsfed"))
    with pytest.raises(EgressError):
        polyfed.run(made, tmp_path / "run")
    assert not (tmp_path / "run").exists()

    @dataclass(frozen=True, kw_only=True)
    class Picky(type(algorithm("fedavg"))):  # type: ignore[misc]
        def init(self, fed: Any, params: Any) -> Any:
            raise RecipeError("not with this data")

    with refuses(RecipeError, "with this data"):
        polyfed.run(recipe(Picky(train=Train(lr=0.1))), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert polyfed.run(recipe(algorithm("fedavg")), tmp_path / "run").folder == tmp_path / "run"


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    inside: list[str] = []

    def other(event: str, **facts: Any) -> None:
        if event == "round-finished" and not inside:
            with refuses(RecipeError, "process is writing"):
                polyfed.run(longer(rounds=3), tmp_path / "run", resume=True)
            inside.append("refused")

    polyfed.run(longer(rounds=3), tmp_path / "run", listeners=[other])
    assert inside == ["refused"]
    assert len(files(tmp_path / "run")["rounds"]) == 3


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    made = replace(longer(rounds=2), data=Toy(rows=330, classes=4, seed=3))
    polyfed.run(made, tmp_path / "run")
    source = made.data.load()
    column = source.modalities["a"]
    other = replace(source, modalities=source.modalities | {"a": replace(column, values=column.values + 1e-3)})
    assert other.fingerprint() != source.fingerprint() == made.data.load().fingerprint()
    facts = tmp_path / "run" / "run.json"
    facts.write_text(facts.read_text().replace(source.fingerprint(), other.fingerprint()))
    with refuses(DataError, "cannot resume"):
        polyfed.run(replace(made, rounds=3), tmp_path / "run", resume=True)


def test_a_run_whose_checkpoint_is_gone_is_not_played_over(tmp_path: Path) -> None:
    polyfed.run(longer(rounds=3), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    before = {
        name: (tmp_path / "run" / name).read_bytes() for name in (run_files.ROUNDS, run_files.EGRESS, run_files.RESULT)
    }
    with refuses(CheckpointError, "3 rounds"):
        polyfed.run(longer(rounds=3), tmp_path / "run", resume=True)
    assert all((tmp_path / "run" / name).read_bytes() == text for name, text in before.items())


@pytest.mark.parametrize("name", [run_files.ROUNDS, run_files.EGRESS])
def test_a_log_that_is_gone_is_not_filled_with_nothing(name: str, tmp_path: Path) -> None:
    polyfed.run(longer(rounds=3), tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    with refuses(CheckpointError, "shorter"):
        polyfed.run(longer(rounds=4), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (run_files.RECIPE, "rounds = ["),
        (run_files.RECIPE, b"\xff\xfe"),
        (run_files.FACTS, ""),
        (run_files.FACTS, "{}"),
        (run_files.FACTS, "[]"),
        (run_files.ROUNDS, "{" * 100_000),
    ],
)
def test_a_damaged_file_of_a_run_is_named(name: str, text: str | bytes, tmp_path: Path) -> None:
    polyfed.run(longer(rounds=2), tmp_path / "run")
    whole = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "run" / name).write_bytes(whole)
    with refuses(CheckpointError, name):
        polyfed.run(longer(rounds=3), tmp_path / "run", resume=True)


def test_the_result_of_fewer_rounds_does_not_pass_for_that_of_more(tmp_path: Path) -> None:
    polyfed.run(longer(rounds=2), tmp_path / "run")
    stopped(tmp_path / "run", 3, longer(rounds=4), resume=True)
    assert not (tmp_path / "run" / run_files.RESULT).exists()
    assert len(polyfed.run(longer(rounds=4), tmp_path / "run", resume=True).rounds) == 4


def test_somebody_elses_run_json_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_files.FACTS).write_text('{"mine": 1}')
    with refuses(RecipeError, "holds no run"):
        polyfed.run(longer(rounds=1), tmp_path / "run")
    assert (tmp_path / "run" / run_files.FACTS).read_text() == '{"mine": 1}'


def test_who_is_refused_a_folder_does_not_take_it_from_its_holder(tmp_path: Path) -> None:
    holder = Records(tmp_path / "run", resume=False)
    with holder.alone():  # it has written nothing yet: data is being loaded
        with refuses(RecipeError, "process is writing"):
            polyfed.run(longer(rounds=1), tmp_path / "run")
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_was_there_is_still_there_after_a_refusal(tmp_path: Path) -> None:
    mine, real = tmp_path / "mine", tmp_path / "real"
    mine.mkdir()
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    (mine / ".lock").write_text("my own")
    for folder in (mine, tmp_path / "link"):
        with pytest.raises(EgressError):
            polyfed.run(recipe(algorithm("cmsfed")), folder)
    assert (mine / ".lock").read_text() == "my own"
    assert real.is_dir()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "victim")
    with refuses(RecipeError, LOCK):
        polyfed.run(longer(rounds=1), tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_first_line_that_was_cut_short_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    made = replace(longer(rounds=3), checkpoint=CheckpointSpec(every=0))
    stopped(tmp_path / "run", 1, made)
    (tmp_path / "run" / run_files.ROUNDS).write_text('{"round": 1, "coh')
    polyfed.run(made, tmp_path / "run", resume=True)
    polyfed.run(made, tmp_path / "one")
    assert files(tmp_path / "run") == files(tmp_path / "one")


def test_a_line_that_is_no_round_is_damage(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 1, replace(longer(rounds=3), checkpoint=CheckpointSpec(every=0)))
    (tmp_path / "run" / run_files.ROUNDS).write_text("[1]\n")
    with refuses(CheckpointError, "should"):
        polyfed.run(longer(rounds=3), tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "a", 2, longer(rounds=3))
    stopped(tmp_path / "b", 2, replace(longer(rounds=3), seed=2))
    shutil.rmtree(tmp_path / "a" / "checkpoint")
    shutil.copytree(tmp_path / "b" / "checkpoint", tmp_path / "a" / "checkpoint")
    before = everything(tmp_path / "a")
    with refuses(CheckpointError, "checkpoint in"):
        polyfed.run(longer(rounds=3), tmp_path / "a", resume=True)
    assert everything(tmp_path / "a") == before


def test_a_checkpoint_that_says_another_round_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 2, longer(rounds=3))
    latest = tmp_path / "run" / "checkpoint" / "latest.json"
    latest.write_text(latest.read_text().replace('"round": 2', '"round": 1'))
    with refuses(CheckpointError, "checkpoint in"):
        polyfed.run(longer(rounds=3), tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", [run_files.ROUNDS, run_files.EGRESS])
@pytest.mark.parametrize("change", [lambda text: text[50:], lambda text: text[: text.index(b"\n") + 1] + text])
def test_a_resume_that_fails_changes_nothing(name: str, change: Any, tmp_path: Path) -> None:
    stopped(tmp_path / "run", 2, longer(rounds=4))
    path = tmp_path / "run" / name
    path.write_bytes(change(path.read_bytes()))
    before = everything(tmp_path / "run")
    try:
        polyfed.run(longer(rounds=4), tmp_path / "run", resume=True)
    except CheckpointError:
        assert everything(tmp_path / "run") == before
    else:
        assert name == run_files.EGRESS, "a ledger's lines are not read again"


def test_the_start_of_a_run_is_that_of_its_first_life(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 1, longer(rounds=2))
    facts = json.loads((tmp_path / "run" / run_files.FACTS).read_text())
    (tmp_path / "run" / run_files.FACTS).write_text(json.dumps(facts | {"started": "2020-01-01T00:00:00+00:00"}))
    polyfed.run(longer(rounds=2), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / run_files.FACTS).read_text())["started"].startswith("2020")


def test_checkpoints_may_be_switched_on_after_rounds_without(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 3, replace(longer(rounds=4), checkpoint=CheckpointSpec(every=10)))
    polyfed.run(longer(rounds=4), tmp_path / "run", resume=True)
    polyfed.run(longer(rounds=4), tmp_path / "one")
    assert files(tmp_path / "run") == files(tmp_path / "one")


def test_rounds_that_will_be_played_again_do_not_count_as_played(tmp_path: Path) -> None:
    made = replace(longer(rounds=6), checkpoint=CheckpointSpec(every=2))
    stopped(tmp_path / "run", 5, made)
    polyfed.run(replace(made, rounds=4), tmp_path / "run", resume=True)
    polyfed.run(replace(made, rounds=4), tmp_path / "one")
    assert files(tmp_path / "run")["sha"] == files(tmp_path / "one")["sha"]


def test_a_report_that_cannot_be_drawn_takes_no_result_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr("polyfed.experiment.running.loop.write_report", broken)
    told: list[str] = []
    run = polyfed.run(
        longer(rounds=1), tmp_path / "run", listeners=[lambda event, **f: told.append(f.get("text", event))]
    )
    assert run.result["rounds"] == 1
    assert any("no ink" in text and "polyfed report" in text for text in told)
    assert "run-finished" in told


def test_runs_that_start_in_the_same_second_have_different_names() -> None:
    """Devices keep the states of a run under its name, and a server starts jobs side by side."""
    names = {run_id(1) for _ in range(100)}
    assert len(names) == 100
    assert all(RUN_NAME.fullmatch(name) for name in names)
