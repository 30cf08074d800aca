import json
from collections import Counter

import numpy as np

from polyfed.report.pages.participation import MOST_COLUMNS, MOST_ROWS, Participation
from polyfed.report.reading import egress
from polyfed.report.reading.run_folder import Folder


def ledger(folder, rows):
    with (folder / "egress.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def random_rows(number, seed=0):
    draw = np.random.default_rng(seed)
    pick = lambda *options: str(draw.choice(options))  # noqa: E731
    for request in range(number):
        size = int(draw.integers(0, 1000))
        yield {
            "run": "r",
            "round": request // 10,
            "ask": request,
            "client": int(draw.integers(0, 50)),
            "message": pick("Update", "Broadcast"),
            "field": pick("params", "sums"),
            "kind": pick("parameters", "prototypes"),
            "block": pick("audio", "text", "shared"),
            "dtype": "float32",
            "shape": [size],
            "bytes": 4 * size,
            "destination": pick("server", "silo", "client"),
            "verdict": pick("allowed", "allowed", "refused"),
        }


def plain_sums(rows):
    sizes, refused = Counter(), Counter()
    for row in rows:
        place = (row["block"], row["kind"], row["destination"])
        if row["verdict"] == "refused":
            refused[place] += 1
        else:
            sizes[place] += row["bytes"]
    return sizes, refused


def test_sums_equal_a_plain_loop(made_run):
    folder = made_run()
    rows = list(random_rows(5000))
    ledger(folder, rows)
    sums = egress.aggregate(Folder(folder))
    assert (sums.bytes, sums.refused) == plain_sums(rows)
    assert sum(sums.crossings.values()) + sum(sums.refused.values()) == 5000


def test_sums_of_each_client_equal_a_plain_loop_and_add_up(made_run):
    folder = made_run()
    rows = list(random_rows(3000))
    ledger(folder, rows)
    sums = egress.aggregate(Folder(folder))
    wanted = Counter()
    for row in rows:
        if row["verdict"] == "allowed":
            wanted[row["client"], row["block"], row["kind"], row["destination"]] += row["bytes"]
    assert sums.clients == wanted
    assert sum(sums.clients.values()) == sum(sums.bytes.values())


def test_sums_do_not_depend_on_how_many_shapes_are_kept(made_run, monkeypatch):
    folder = made_run()
    ledger(folder, random_rows(500))
    whole = egress.aggregate(Folder(folder))
    monkeypatch.setattr(egress, "MOST_SHAPES", 3)
    assert egress.aggregate(Folder(folder)) == whole


def test_order_of_keys_in_a_row_does_not_matter(made_run):
    folder = made_run()
    rows = list(random_rows(100))
    turned = [{"message": row["message"], **row} for row in rows]
    ledger(folder, turned)
    sums = egress.aggregate(Folder(folder))
    assert (sums.bytes, sums.refused) == plain_sums(rows)


def test_every_client_round_is_counted_once_whatever_the_bins():
    draw = np.random.default_rng(1)
    for clients, rounds in ((1, 1), (7, 3), (61, 121), (1000, 500)):
        grid = Participation(clients, rounds)
        total = 0
        for number in range(1, rounds + 1):
            cohort = [int(c) for c in draw.choice(clients, min(5, clients), replace=False)]
            total += len(cohort)
            grid.add({"round": number, "cohort": cohort, "trained": {"audio": cohort[:1]}, "missing": {}})
        table = grid.table(["audio"])
        assert np.sum(table["asked"]) == total
        assert np.sum(table["panels"]["audio"]) == rounds
        assert len(table["asked"]) <= MOST_ROWS
        assert len(table["asked"][0]) <= MOST_COLUMNS


def test_cell_of_a_client_and_round_is_where_it_belongs():
    grid = Participation(120, 240)
    grid.add({"round": 240, "cohort": [0, 119], "trained": {"text": [119]}, "missing": {"0": "gone"}})
    table = grid.table(["audio", "text"])
    assert table["asked"][0][-1] == table["asked"][-1][-1] == 1
    assert table["missing"][0][-1] == 1
    assert list(table["panels"]) == ["text"]
    assert table["panels"]["text"][-1][-1] == 1


def test_methods_that_send_no_parameters_have_one_panel_of_answers():
    grid = Participation(4, 2)
    grid.add({"round": 1, "cohort": [0, 1], "trained": {}, "missing": {"1": "gone"}})
    assert np.sum(grid.table(["audio"])["panels"]["any"]) == 1
