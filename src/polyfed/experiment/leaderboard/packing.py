"""Packs the method of a study as an entry of a board, with its control and its placebo."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.errors import DataError, RecipeError, command, did_you_mean
from polyfed.core.system.files import STUDY, replace_text
from polyfed.core.system.json_and_toml import to_json
from polyfed.experiment.leaderboard.entry import (
    FORMAT,
    NOT_PACKED,
    PATHS,
    Code,
    Entry,
    EntryRun,
    Part,
    faults_of,
    here,
    module_file,
    numbers,
    refuse,
)
from polyfed.experiment.study.board import FAILURES
from polyfed.experiment.study.ranges import at, remove
from polyfed.report.comparison.labels import PLACEBO, without_placebo
from polyfed.report.reading.run_folder import Folder
from polyfed.report.reading.study_folder import StudyRun, facts_of_study

CONTROL = "fedavg"


def pack_entry(
    study: str | Path,
    out: str | Path,
    *,
    method: str | None = None,
    scenario: str | None = None,
    control: str | None = None,
    placebo: str | None = None,
    no_placebo: str = "",
) -> Entry:
    """Write the entry of a study's method.

    Args:
        study: the folder of the study.
        out: the file to write.
        method: the method. It can be left out if the study has one method besides control and placebos.
        scenario: the scenario, if the study has several.
        control: the control, by default the method whose algorithm is `fedavg`.
        placebo: the placebo, by default the method that differs only in `algorithm.placebo`.
        no_placebo: why a method without placebo has none.

    Raises:
        RecipeError: the folder holds no study, or a name is wrong or missing.
        DataError: a file is damaged, or the entry would break rules of the board. The text tells all of them.
    """
    study = Path(study)
    if not (study / STUDY).is_file():
        Folder(study)
        raise RecipeError(
            f"{study} is a single run, and an entry needs seeds, a control and a placebo. Write a study of them "
            "(`polyfed docs board`), run it with `polyfed sweep`, and pack its folder"
        )
    facts = facts_of_study(study)
    chosen = _named("scenario", scenario, [run["scenario"] for run in facts.get("runs", [])])
    runs = [run for run in facts["runs"] if run["scenario"] == chosen]
    firsts = {run["method"]: run for run in runs if not run["tuning"] and run["state"] == "finished"}
    folders = {name: Folder(study / run["folder"]) for name, run in firsts.items()}
    controls = [name for name, folder in folders.items() if at(folder.recipe, "algorithm.name") == CONTROL]
    placebos = [name for name, folder in folders.items() if at(folder.recipe, PLACEBO) not in (None, "none")]
    control = _named("control", control, folders if control else controls)
    method = _named("method", method, folders if method else [n for n in folders if n not in (control, *placebos)])
    own = without_placebo(folders[method], tuple(firsts[method].get("chosen", {})))[0]
    if placebo is None and not no_placebo:
        found = [n for n in placebos if without_placebo(folders[n], tuple(firsts[n].get("chosen", {})))[0] == own]
        placebo = found[0] if found else None
    parts: dict[str, Part] = {"method": _part(study, method, runs), "control": _part(study, control, runs)}
    if placebo is not None:
        parts["placebo"] = _part(study, _named("placebo", placebo, folders), runs)
    entry: Any = {
        "format": FORMAT,
        "scenario": chosen,
        "metrics": facts.get("metrics", {}).get(chosen, []),
        "data": str(folders[method].facts.get("data", {}).get("sha256", "")),
        "no_placebo": no_placebo,
        "code": _code(at(folders[method].recipe, "algorithm.name")),
        "made": here(),
    } | parts
    _refuse_other_versions(folders.values(), entry["made"]["versions"])
    refuse(f"{method} of {study} breaks the rules of the board (polyfed docs board)", list(faults_of(entry)))
    replace_text(Path(out), to_json(entry) + "\n")
    return entry  # type: ignore[no-any-return]


def _named(what: str, given: str | None, known: Iterable[str]) -> str:
    """Return the name that was given, or the only one.

    Raises:
        RecipeError: there is no such name, or several.
    """
    names = list(dict.fromkeys(known))
    if given is not None and given in names:
        return given
    if given is None and len(names) == 1:
        return names[0]
    wrong = f"'{given}' is none of the study" if given is not None else f"the study has {len(names)} that could be it"
    raise RecipeError(f"--{what}: {wrong}; {did_you_mean(given or '', names)}")


def _part(study: Path, name: str, runs: Sequence[StudyRun]) -> Part:
    """Return the runs of a method."""
    found: list[EntryRun] = []
    recipe: dict[str, Any] | None = None
    for run in runs:
        if run["method"] != name:
            continue
        if run["state"] != "finished" and not (run["tuning"] and run["state"] == "failed"):
            raise DataError(
                f"{study}: {run['folder']} of {name} is {run['state']}. An entry needs whole runs, also of the search "
                f"(no [search] prune). Go on with the study: {command('sweep', 'STUDY.toml')}"
            )
        chosen = dict(run.get("chosen", {}))
        if run["state"] == "failed":
            seed, result = _seed_of_diverged(study, run), None
        else:
            folder = Folder(study / run["folder"])
            seed, result = int(folder.recipe["seed"]), numbers(folder.result)
            if not run["tuning"] and recipe is None:
                recipe = _packed(folder.recipe, chosen)
        found.append({"seed": seed, "tuning": run["tuning"], "chosen": chosen, "result": result})
    if recipe is None:
        raise DataError(f"{study}: {name} has no finished run. Go on with the study: {command('sweep', 'STUDY.toml')}")
    return {"name": name, "recipe": recipe, "runs": found}


def _seed_of_diverged(study: Path, run: StudyRun) -> int:
    """Return the seed of a run whose training diverged, which a sweep notes in a file. Others cannot be packed."""
    if not (study / FAILURES / f"{Path(run['folder']).name}.json").is_file():
        raise DataError(f"{run['folder']} failed ({run.get('why', '')}). Mend it, and go on with the study")
    return int(run.get("seed", 0))


def _packed(recipe: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without what an entry leaves out, and without directories."""
    table = {key: dict(value) if isinstance(value, Mapping) else value for key, value in recipe.items()}
    for key in NOT_PACKED:
        table.pop(key, None)
    for key in chosen:
        remove(table, key)
    for key in PATHS:
        if key in table.get("data", {}):
            table["data"][key] = Path(str(table["data"][key])).name
            if key != "path":
                del table["data"][key]
    return table


def _code(name: str) -> Code | None:
    """Return the code of a method of the user's own."""
    if ":" not in name:
        return None
    text = module_file(name).read_text(encoding="utf-8")
    return {"module": name.partition(":")[0], "sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}


def _refuse_other_versions(folders: Iterable[Folder], now: Mapping[str, str]) -> None:
    """Refuse runs of other versions than those that the entry would name.

    Raises:
        DataError: a run has other versions.
    """
    for folder in folders:
        ran = {name: str(folder.facts.get("versions", {}).get(name, "")) for name in now}
        if ran != now:
            raise DataError(f"{folder.path} ran with {ran}, and this is {now}. Pack it with the versions that ran it")
