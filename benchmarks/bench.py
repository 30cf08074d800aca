"""Measure polyfed's speed and write docs/results/speed.md with its plot and its ratios, or compare with those ratios.

    python benchmarks/bench.py [--runs 3] [--rounds 15]    # `make bench`: about 15 minutes on two cores
    python benchmarks/bench.py --check [--tolerance 0.25]    # `make bench-check`: exit code 1 if slower
    python benchmarks/bench.py --report --peers --setting small    # `make bench-report`: CI's, whose exit code is 0

Every number is a ratio: how many times faster a program is than another program that takes turns with it.
The page's part between the two markers is replaced, and the text around it stays.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from environments import PEERS
from settings import COHORTS, CONVOLVED, SETTINGS, SIZES, Setting
from speed import BARE, CACHE, Program, Wanted, measure, times_faster, wanted

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "speed.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"

OURS = ("polyfed sequential", "polyfed vectorised")

TABLES = ("food", "small", *CONVOLVED)

SWEEP_ROUNDS = 8
"""Counted rounds of each program at a point of the plot; the tables use more."""

Curves = dict[str, dict[str, float]]
"""Name of a curve -> position on the x axis -> how many times faster than the bare loop."""


def cores() -> list[int]:
    """The numbers of worker processes to measure: powers of two, and all cores."""
    most = len(os.sched_getaffinity(0))
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def repeated(setting: Setting, what: Sequence[Wanted], rounds: int, runs: int) -> list[list[Program]]:
    """Measure several times, each time with new processes."""
    print(f"{setting.name}: {', '.join(one.name for one in what)}", file=sys.stderr, flush=True)
    return [measure(setting, what, rounds, CACHE) for _ in range(runs)]


def ratio(found: Sequence[Sequence[Program]], name: str, than: str) -> float | None:
    """The median over runs of how many times faster a program is than another one; None if one of them failed."""
    values = []
    for running in found:
        one, other = (next(p for p in running if p.name == wished) for wished in (name, than))
        if len(one.seconds) < 2 or len(other.seconds) < 2:
            return None
        values.append(times_faster(one, other))
    return statistics.median(values)


def table(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all programs on a setting: times, and each engine's ratios to the other programs."""
    what = wanted(max(cores()), () if setting.name in CONVOLVED else options.peers)
    found = repeated(setting, what, options.rounds, options.runs)
    rows: dict[str, dict[str, Any]] = {}
    for place, one in enumerate(what):
        own = [running[place] for running in found]
        failure = next((program.failure for program in own if program.failure), "")
        seconds = [statistics.median(program.seconds) for program in own if len(program.seconds) > 1]
        rows[one.name] = {"ms": 1e3 * statistics.median(seconds)} if seconds and not failure else {"failure": failure}
    names = [one.name for one in what]
    ratios = {f"{ours} / {other}": ratio(found, ours, other) for ours in OURS for other in names if other not in OURS}
    known = {name: value for name, value in ratios.items() if value is not None}
    said = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
    # said at once, so that a measurement that is stopped has told what it found
    print(f"{setting.name}: times as fast: {said}", file=sys.stderr, flush=True)
    return {"programs": rows, "ratios": known}


def curves(points: Iterator[tuple[str, Setting, Sequence[Wanted]]], options: argparse.Namespace) -> Curves:
    """Measure the points of some curves: (position, setting, programs); the first program is the reference."""
    found: Curves = {}
    for place, setting, what in points:
        runs = repeated(setting, what, min(options.rounds, SWEEP_ROUNDS), options.runs)
        for one in what[1:]:
            value = ratio(runs, one.name, what[0].name)
            if value is not None:
                found.setdefault(one.name, {})[place] = value
    return found


def over_cores() -> Iterator[tuple[str, Setting, Sequence[Wanted]]]:
    """Points over worker processes; the reference is the bare loop with one thread."""
    for workers in cores():
        for name in ("small", "food"):
            yield (
                str(workers),
                SETTINGS[name],
                [
                    Wanted(BARE, "run_bare.py", 1),
                    *(
                        Wanted(f"{name}, {e}", "run_polyfed.py", 1, (e, str(workers)))
                        for e in ("sequential", "vectorised")
                    ),
                ],
            )


def over(settings: Sequence[Setting], place: str) -> Iterator[tuple[str, Setting, Sequence[Wanted]]]:
    """Points over an attribute of the settings; the reference is the bare loop on all cores."""
    for setting in settings:
        yield str(getattr(setting, place)), setting, wanted(max(cores()), ())


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    load = os.getloadavg()[0]
    return {
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine() | {"load before": round(load, 1)},
        "versions": {name: version(name) for name in ("polyfed", "torch", "numpy")}
        | {"python": platform.python_version(), "peers": [peer.name for peer in PEERS]},
        "runs": options.runs,
        "rounds": options.rounds,
        "tables": {name: table(SETTINGS[name], options) for name in options.setting or TABLES},
        "curves": {} if options.tables_only else all_curves(options),
    }


def all_curves(options: argparse.Namespace) -> dict[str, Curves]:
    """Measure the curves of the plot, by the name of the x axis."""
    return {
        "worker processes": curves(over_cores(), options),
        "clients in a round": curves(over(COHORTS, "cohort"), options),
        "parameters": curves(over(SIZES, "num_parameters"), options),
    }


def machine() -> dict[str, Any]:
    """The processor and the memory of this machine."""
    names = [line.partition(":")[2].strip() for line in text_of("/proc/cpuinfo").splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": (names or [platform.machine()])[0], "cores": max(cores()), "memory GiB": round(memory)}


def text_of(path: str) -> str:
    """The text of a file; empty if there is none."""
    return Path(path).read_text() if Path(path).exists() else ""


def ratios_of(found: dict[str, Any]) -> dict[str, float]:
    """All ratios of a measurement, by a name that says what was compared."""
    flat = {f"{name}: {key}": value for name, one in found["tables"].items() for key, value in one["ratios"].items()}
    for axis, of_axis in found["curves"].items():
        for curve, points in of_axis.items():
            flat |= {f"{curve}, {place} {axis} / {BARE}": value for place, value in points.items()}
    return flat


def text(found: dict[str, Any]) -> str:
    """The generated part of the page."""
    facts = found["machine"]
    said = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if name != "peers")
    lines = [
        f"`make bench` wrote this part on {found['when']}: {facts['cores']} cores ({facts['processor']}), "
        f"{facts['memory GiB']} GiB, load {facts['load before']} before. Versions: {said}.",
        f"Each figure is the median of {found['runs']} runs of {found['rounds']} rounds.",
    ]
    others = list(dict.fromkeys(p for one in found["tables"].values() for p in one["programs"] if p not in OURS))
    lines += [
        "",
        f"| setting | program | ms a round | {' | '.join(f'times as fast as {other}' for other in others)} |",
        "|---|---|---:|" + "---:|" * len(others),
    ]
    for name, one in found["tables"].items():
        for program, row in one["programs"].items():
            values = [one["ratios"].get(f"{program} / {other}") for other in others]
            shown = ["" if value is None else f"{value:.2f}" for value in values]
            took = f"{row['ms']:.1f}" if "ms" in row else f"no figure: {row['failure']}"
            lines.append(f"| {name} | {program} | {took} | {' | '.join(shown)} |")
    lines += ["", "![How many times faster than the bare loop](speed.svg)"]
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the curves."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "polyfed", "font.size": 8}
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, len(found["curves"]), sharey=True)
    for panel, (axis, of_axis) in zip(panels, found["curves"].items(), strict=True):
        for curve, points in of_axis.items():
            panel.plot([int(place) for place in points], list(points.values()), marker="o", markersize=3, label=curve)
        panel.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
        panel.set_xscale("log", base=2 if axis == "worker processes" else 10)
        panel.set_xlabel(axis)
        panel.legend(fontsize=6)
    panels[0].set_ylabel("times as fast as the bare loop")
    figure.savefig(path, format="svg", metadata={"Date": None})


def write(found: dict[str, Any]) -> None:
    """Write the page's generated part, the plot, and the ratios for the next comparison."""
    PAGE.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, PAGE.with_suffix(".svg"))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, there, after = rest.partition(END)
    if not there:
        sys.exit(f"{PAGE} has no part between {BEGIN} and {END}: add these two lines where the figures belong")
    PAGE.write_text(f"{before}{BEGIN}\n{text(found)}\n{END}{after}")


def slower(before: dict[str, float], now: dict[str, float], tolerance: float) -> list[str]:
    """What has become slower than the tolerance allows, in sentences; a ratio that is missing now counts as slower."""
    found = []
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            found.append(f"{name}: was {old:.2f}, and could not be measured now")
        elif new < old * (1 - tolerance):
            found.append(f"{name}: was {old:.2f}, is {new:.2f} ({100 * (new / old - 1):+.0f} %)")
    return found


def report(recorded: dict[str, Any], now: dict[str, Any]) -> str:
    """All ratios that were measured now, beside the recorded ones. Ratios of another machine may differ a lot."""
    before, here = ratios_of(recorded), now["machine"]
    lines = [f"{here['processor']}, {here['cores']} cores, load {here['load before']}; recorded: {recorded['machine']}"]
    lines += [
        f"{name}: {new:.2f}, recorded {before.get(name, float('nan')):.2f}" for name, new in ratios_of(now).items()
    ]
    failed = {
        name: row["failure"]
        for one in now["tables"].values()
        for name, row in one["programs"].items()
        if "failure" in row
    }
    return "\n".join([*lines, *(f"{name}: no figure: {why}" for name, why in failed.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="runs of each program; medians count")
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds of each run")
    parser.add_argument("--setting", action="append", choices=TABLES, help="of the tables; default: all")
    parser.add_argument("--peers", nargs="*", default=["pfl", "flower"], help="pfl, flower; none: only our own")
    parser.add_argument("--tables-only", action="store_true", help="with --check: leave out the plot")
    parser.add_argument("--check", action="store_true", help="compare with the recorded ratios, and write nothing")
    parser.add_argument("--report", action="store_true", help="print the tables' ratios beside the recorded ones")
    parser.add_argument(
        "--tolerance", type=float, default=0.25, help="share by which a ratio may fall; timings are noisy"
    )
    options = parser.parse_args()
    if options.report:
        options.tables_only = True
        recorded = json.loads(PAGE.with_suffix(".json").read_text())
        print(report(recorded, measured(options)))
        return
    if not options.check:
        if options.tables_only:
            parser.error("--tables-only needs --check, because the page has the plot too")
        write(measured(options))
        return
    recorded = json.loads(PAGE.with_suffix(".json").read_text())
    if options.tables_only:
        recorded["curves"] = {}
    options.setting = options.setting or list(recorded["tables"])
    recorded["tables"] = {name: recorded["tables"][name] for name in options.setting}
    if {**recorded["machine"], "load before": 0} != {**machine(), "load before": 0}:
        print(f"The recorded ratios are of another machine: {recorded['machine']}. Ratios may differ for this reason.")
    found = slower(ratios_of(recorded), ratios_of(measured(options)), options.tolerance)
    for line in found:
        print(line)
    if found:
        sys.exit(1)
    print(f"Nothing is more than {100 * options.tolerance:.0f} % slower than on {recorded['when']}.")


if __name__ == "__main__":
    main()
