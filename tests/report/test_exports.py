"""A comparison as Markdown, CSV, LaTeX, JSON and figures, from Python and from the command line."""

import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from sample import write_run

from polyfed.cli import main
from polyfed.report import compare, evidence, write_comparison, write_figures
from polyfed.report.comparison import tables as comparison_tables


@pytest.fixture
def runs(tmp_path):
    """Three methods on three seeds, with simulated time and a name that LaTeX would read as a command."""
    folders = []
    for name in ("fedavg", "my_own%method", "moon"):
        for seed in (1, 2, 3):
            folder = write_run(tmp_path / f"{name[:4]}-{seed}", seed=seed, algorithm=name, rounds=8)
            rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
            text = "".join(json.dumps(row | {"simulated_seconds": 2.0}) + "\n" for row in rows)
            (folder / "rounds.jsonl").write_text(text)
            folders.append(folder)
    return folders


def printed(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["compare", *map(str, words)])
    return end.value.code, capsys.readouterr().out


def test_formats_hold_the_same_numbers(runs, capsys):
    comparison = compare(runs)
    code, text = printed(capsys, *runs, "--format", "csv")
    frame = pd.read_csv(io.StringIO(text))
    assert code == 0
    assert list(frame["metrics.global.accuracy"]) == pytest.approx(
        [r["metrics.global.accuracy"] for r in comparison.rows()]
    )
    found = json.loads(printed(capsys, *runs, "--format", "json")[1])
    assert [group["n"] for group in found["groups"]] == [3, 3, 3]
    assert found["tests"]["differences"][0]["p"] is None, "these runs differ by the same number on all seeds"
    assert math.isnan(frame["p"][1])
    assert json.loads(printed(capsys, *runs, "--json")[1]) == json.loads(json.dumps(comparison.rows()))
    markdown = printed(capsys, *runs, "--format", "markdown")[1]
    accuracy = f"{100 * comparison.rows()[0]['metrics.global.accuracy']:.1f} ± "
    assert accuracy in markdown
    assert accuracy in printed(capsys, *runs)[1]


def test_every_markdown_table_is_complete(runs):
    comparison = compare(runs)
    text = comparison_tables.markdown(comparison_tables.sheets_of(comparison, evidence(comparison)))
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 4
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1
    assert len(re.findall(r"\*\*[\d.]+ ± [\d.]+\*\*", text)) >= 3, "the best score of each column is bold"


def test_words_of_the_user_are_no_commands_of_latex(runs):
    comparison = compare(runs)
    text = comparison_tables.latex(comparison_tables.sheets_of(comparison, evidence(comparison)))
    assert r"my\_own\%method" in text
    assert "my_own" not in text
    assert text.count(r"\toprule") == text.count(r"\bottomrule") == 4


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="TeX is not installed: apt-get install texlive-latex-base")
def test_latex_compiles(runs, tmp_path):
    comparison = compare(runs)
    body = comparison_tables.latex(comparison_tables.sheets_of(comparison, evidence(comparison)))
    page = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n" + body + "\\end{document}\n"
    (tmp_path / "page.tex").write_text(page)
    words = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 10_000


def test_figures_are_written_as_svg_and_pdf(runs, tmp_path):
    comparison = compare(runs)
    proof = evidence(comparison)
    paths = write_figures(comparison, proof, tmp_path / "one")
    names = {path.stem for path in paths}
    assert names == {"rounds", "bytes", "simulated-seconds", "differences", "ranks"}
    assert {path.suffix for path in paths} == {".svg", ".pdf"}
    text = (tmp_path / "one" / "rounds.svg").read_text()
    assert "my_own%method" in text
    assert "MB, both ways" in (tmp_path / "one" / "bytes.svg").read_text()
    assert (tmp_path / "one" / "ranks.pdf").read_bytes().startswith(b"%PDF")
    assert "#0d1117" not in text


def test_equal_runs_give_equal_figures_and_dark_ones_are_dark(runs, tmp_path):
    comparison = compare(runs[:1])
    proof = evidence(comparison)
    once, again = (write_figures(comparison, proof, tmp_path / name, dark=True) for name in ("one", "two"))
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in once]
    assert "#0d1117" in once[0].read_text()


def test_the_page_has_tests_ranks_and_costs(runs, tmp_path):
    page = write_comparison(compare(runs), tmp_path / "page.html").read_text()
    for words in ("paired by seed", "critical difference", "Score against bytes", "Score against simulated seconds"):
        assert words in page


def test_a_single_run_is_compared_without_tests(runs, tmp_path, capsys):
    code, text = printed(capsys, runs[0], "--figures", tmp_path / "figures")
    assert code == 0
    assert "paired" not in text
    assert {path.stem for path in Path(tmp_path / "figures").iterdir()} == {"rounds", "bytes", "simulated-seconds"}


def test_two_words_for_the_output_are_refused(runs, capsys):
    with pytest.raises(SystemExit) as end:
        main(["compare", str(runs[0]), "--json", "--format", "csv"])
    assert end.value.code == 2
    assert "keep one of them" in capsys.readouterr().err


def test_every_form_of_a_comparison_names_the_methods_whose_runs_failed(runs, tmp_path, capsys):
    named = [
        {"folder": f"{name[:4]}-{seed}", "method": name, "scenario": "s", "tuning": False, "state": "finished"}
        for name, seeds in (("fedavg", (1, 2, 3)), ("moon", (1, 2)))
        for seed in seeds
    ]
    why = "EgressError: the policy forbids:\n  prototypes"
    lost = {"folder": "gone", "method": "moon", "scenario": "s", "tuning": False, "state": "failed", "why": "killed"}
    search = lost | {"method": "cmsfed", "tuning": True, "why": why}
    facts = {"runs": [*named, lost, search]}
    for listed in (None, [("moon", 1, 3, "killed"), ("cmsfed", 0, 0, "EgressError: the policy forbids: prototypes")]):
        if listed is not None:  # as a sweep writes it; older folders lack the list
            keys = ("method", "missing", "of", "why")
            facts["not_compared"] = [{"scenario": "s"} | dict(zip(keys, entry, strict=True)) for entry in listed]
        (tmp_path / "study.json").write_text(json.dumps(facts))
        sentences = [
            "not compared: 1 of 3 runs of moon (killed)",
            "not compared: cmsfed (EgressError: the policy forbids: prototypes)",
        ]
        comparison = compare([tmp_path])
        assert list(comparison.not_compared) == sentences
        for form in ("table", "markdown", "latex"):
            text = printed(capsys, tmp_path, "--format", form)[1]
            assert all(sentence in " ".join(text.split()) for sentence in sentences)
        assert "Not compared: moon, cmsfed.}" in text, "the caption in LaTeX"
        last = json.loads(printed(capsys, tmp_path, "--json")[1])[-1]
        assert (last["label"], last["n"], last["not_compared"]) == ("cmsfed", 0, sentences[1][22:-1])
        found = json.loads(printed(capsys, tmp_path, "--format", "json")[1])
        assert [entry["method"] for entry in found["not_compared"]] == ["moon", "cmsfed"]
        frame = pd.read_csv(io.StringIO(printed(capsys, tmp_path, "--format", "csv")[1]))
        assert frame["n"].tolist() == [3, 2, 0]
        page = write_comparison(comparison, tmp_path / "c.html", evidence(comparison)).read_text()
        assert all(sentence in page for sentence in sentences)
        drawn = write_figures(comparison, evidence(comparison), tmp_path / "figures")
        assert all("not compared: moon, cmsfed" in path.read_text() for path in drawn if path.suffix == ".svg")
