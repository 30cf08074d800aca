"""Describes the folder of a run as a Research Object Crate, so that archives and other tools know what each file is.

The metadata follow RO-Crate 1.1 (https://w3id.org/ro/crate/1.1), and the run is a `CreateAction` as in the profile
"Process Run Crate". They are one JSON-LD file of about 20 entities, for which a library would bring more code than it
saves; a test reads them with one (`rocrate`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.system.files import (
    AUDIT,
    CERTIFICATE,
    EGRESS,
    FACTS,
    LEAKAGE,
    PUBLIC_KEY,
    RECEIPTS,
    RECIPE,
    RESULT,
    ROUNDS,
    replace_text,
)
from polyfed.experiment.certificate.issue import digest_of
from polyfed.privacy.egress.audit_log.log import HEAD
from polyfed.report import REPORT
from polyfed.report.reading.run_folder import Folder

METADATA = "ro-crate-metadata.json"

JSON, LINES, TOML, HTML, PEM = (
    "application/json",
    "application/jsonl",
    "application/toml",
    "text/html",
    "application/x-pem-file",
)

PARTS = {
    RECIPE: (TOML, "The recipe with every default"),
    FACTS: (JSON, "Facts about data, clients, model and policy"),
    ROUNDS: (LINES, "One object for each round"),
    EGRESS: (LINES, "The ledger: every part of every message that entered or left a client"),
    AUDIT: (LINES, "The audit log of the server, a signed chain of the rows of the ledger"),
    HEAD: (JSON, "The signed head of the audit log"),
    PUBLIC_KEY: (PEM, "The public key of the run, which checks the certificate and the audit log"),
    RECEIPTS: (JSON, "What each device has signed about its own ledger"),
    RESULT: (JSON, "The scores and costs of the run"),
    LEAKAGE: (JSON, "What the messages of the run give away, as far as attacks have measured it"),
    CERTIFICATE: (JSON, "The signed certificate of the run; `polyfed certify --verify` checks it"),
    REPORT: (HTML, "The report"),
}
"""The files of a run that belong to a crate, with their formats and what they hold. The private key never does."""


def write_crate(run: Path, content: Mapping[str, Any]) -> Path:
    """Write `ro-crate-metadata.json` into the folder of a run.

    Args:
        run: the folder of the run.
        content: the content of its certificate.

    Returns:
        The path of the file.
    """
    path = run / METADATA
    replace_text(path, json.dumps(crate(Folder(run), content), indent=1))
    return path


def crate(folder: Folder, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a run's folder, JSON-LD in the flattened form of RO-Crate 1.1.

    Args:
        folder: the run.
        content: the content of its certificate.
    """
    files = [_file(folder.path / name, *about) for name, about in PARTS.items() if (folder.path / name).is_file()]
    made = [{"@id": one["@id"]} for one in files if one["@id"] != RECIPE]
    what = f"{content['method']} on {folder.result.get('dataset') or folder.recipe.get('data', {}).get('name', '')}"
    clients = f"{len(content['clients'])} clients, {content['rounds']} rounds"
    metadata = {
        "@id": METADATA,
        "@type": "CreativeWork",
        "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
        "about": {"@id": "./"},
    }
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Federated learning: {what}",
        "description": f"The {content['kind']} {content['run']} of {what} with {clients}, and its certificate",
        "datePublished": content["issued"],
        "license": {"@id": "#licence"},
        "conformsTo": {"@id": "https://w3id.org/ro/wfrun/process/0.5"},
        "hasPart": [{"@id": one["@id"]} for one in files],
        "mentions": [{"@id": "#run"}],
    }
    action = {
        "@id": "#run",
        "@type": "CreateAction",
        "name": content["run"],
        "description": what,
        "startTime": content["started"],
        "actionStatus": {"@id": f"http://schema.org/{'Completed' if content['finished'] else 'Active'}ActionStatus"},
        "instrument": {"@id": "#polyfed"},
        "object": [{"@id": RECIPE}],
        "result": made,
    }
    versions = ", ".join(f"{name} {version}" for name, version in sorted(content["versions"].items()))
    software = {
        "@id": "#polyfed",
        "@type": "SoftwareApplication",
        "name": "polyfed",
        "version": str(content["versions"].get("polyfed", "")),
        "description": f"Ran with {versions}",
    }
    licence = {
        "@id": "#licence",
        "@type": "CreativeWork",
        "name": "No licence is stated",
        "description": "Ask the owners of the data before you use or publish these files",
    }
    profile = {"@id": "https://w3id.org/ro/wfrun/process/0.5", "@type": "CreativeWork", "name": "Process Run Crate"}
    profile["version"] = "0.5"
    graph = [metadata, root, *files, action, software, licence, profile]
    return {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": graph}


def _file(path: Path, form: str, about: str) -> dict[str, Any]:
    return {
        "@id": path.name,
        "@type": "File",
        "name": path.name,
        "description": about,
        "encodingFormat": form,
        "contentSize": str(path.stat().st_size),
        "sha256": digest_of(path),
    }
