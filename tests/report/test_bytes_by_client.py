"""What left which client, on the page: the ledger's bytes, most first, never more rows than fit."""

import json

from polyfed.report import write_report
from polyfed.report.pages import bytes_by_client
from polyfed.report.reading import egress
from polyfed.report.reading.run_folder import Folder


def table(folder):
    read = Folder(folder)
    return bytes_by_client.senders(egress.aggregate(read), read)


def row(client, size, kind="parameters", block="audio", to="server", verdict="allowed"):
    head = {"run": "r", "round": 1, "ask": 0, "client": client, "message": "Update", "field": "x"}
    tail = {"kind": kind, "block": block, "dtype": "float32", "shape": [size], "bytes": size}
    return head | tail | {"destination": to, "verdict": verdict}


def ledger(folder, rows):
    (folder / "egress.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return folder


def test_clients_stand_by_bytes_sent_and_refused_ones_sent_nothing(made_run):
    sent = [
        row(3, 100),
        row(1, 300),
        row(1, 200, "raw", "text"),
        row(2, 900, verdict="refused"),
        row(2, 50, to="client"),
    ]
    shown = table(ledger(made_run(), sent))
    assert shown.kinds == ["parameters", "raw"]
    assert [(r.client, r.sent, r.share, r.received) for r in shown.rows] == [
        (1, 500, 100, 0),
        (3, 100, 20, 0),
        (2, 0, 0, 50),
    ]
    assert shown.rows[0].parts == [(300, "audio 300 B"), (200, "text 200 B")]
    assert shown.rows[1].parts == [(100, "audio 100 B"), (0, "")]


def test_what_stays_in_a_silo_says_so(made_run):
    shown = table(ledger(made_run(), [row(0, 10, "embeddings", to="silo"), row(0, 5, "embeddings")]))
    assert shown.rows[0].parts == [(15, "audio 5 B, audio to the silo 10 B")]


def test_many_clients_are_cut_and_the_page_says_so(made_run, monkeypatch):
    monkeypatch.setattr(bytes_by_client, "MOST_CLIENTS", 5)
    folder = ledger(made_run(), [row(client, 10 + client) for client in range(30)])
    shown = table(folder)
    assert ([r.client for r in shown.rows], shown.total) == ([29, 28, 27, 26, 25], 30)
    page = write_report(folder).read_text()
    assert "By client, most bytes first (the first 5 of 30)" in page
    assert 'title="audio 39 B">39 B</td>' in page


def test_a_run_without_a_ledger_has_no_table(made_run):
    folder = made_run()
    (folder / "egress.jsonl").unlink()
    assert "By client" not in write_report(folder).read_text()
