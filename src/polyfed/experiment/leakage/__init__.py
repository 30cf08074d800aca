"""The leakage audit: `polyfed audit` measures what the messages of a run reveal, by kind and by modality.

This folder has nothing to do with the audit logs of `polyfed audit-log`, which record the messages that clients sent.

- `audit`: which attacks apply to a run, and the file `leakage.json`.
- `capture`: the messages of clients, captured in a simulation of the run's first rounds.
- `findings`: an attack's advantage over the best guess without the message, with a confidence interval.
- `labels`: the classes of clients and of rows; `properties`: the modalities of clients.
- `membership`: whether a row was trained on; `reconstruction`: samples from gradients and from embeddings.
- `rows`: the rows that the entries of a reply describe.
"""

from polyfed.experiment.leakage.audit import LeakageAudit, audit, write
from polyfed.experiment.leakage.findings import Finding

__all__ = ["Finding", "LeakageAudit", "audit", "write"]
