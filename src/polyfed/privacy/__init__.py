"""Privacy: rules about the data that may leave a client, their enforcement, and records of what has left.

- `policy`: the kinds of data that may leave, by modality and destination ([egress] of a recipe or a device).
- `announcement`: everything that the replies of a client can hold. `polyfed check` and the gate use the same list.
- `gate`: all replies leave through the gate. It refuses data that the policy forbids, and data that is not announced.
- `limits`: the minimum rows and steps, and the maximum rounds and requests, of a device ([limits] of a device).
- `limit_guard`: the checks of these limits during local training.
- `requirements`: the protection that a device demands ([require] of a device).
- `ledger`: one row for each part of a message that was received, sent or refused.
- `differential`: the options of differential privacy ([privacy] of a recipe).
- `accounting`: epsilon and noise from the library dp-accounting.
- `adaptive_clipping`: a clip norm that follows a quantile of the norms of the updates.
- `mechanism`: the changes that a client makes to its reply before the gate: clipping, noise, and zeros in some fields.
- `guarantee`: epsilon of a run by block and kind, and the list of data that is not protected.
- `fixed_point`: the conversion of numbers to integers, in which secure aggregation adds the clients' values.
- `masks`: the keys, masks and secret shares of secure aggregation.
- `contents`: the SHA-256 of each part of a message, for the audit log.
- `audit_log`: the signed log of a device or server, in which each line holds the hash of the line before.
- `audit_log_verification`: the verification of an audit log.
- `merkle`: Merkle trees, whose roots commit to logs and ledgers. `audit_log_proof`: a part of a log that proves itself.
- `receipts`: what a device signs about its ledger of a run. `log_keys`: signatures, and whose log a key signs.
- `edge_receipts`: what the edge of a silo signs about what passed between the silo and the server.
"""
