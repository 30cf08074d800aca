"""What may leave a client, who decides it, and how one can prove afterwards what did leave?

- `policy`: the kinds of data that may leave, by modality and destination ([egress] of a recipe or a device).
- `announcement`: everything that the replies of a client can hold; `polyfed check` and the gate use the same list.
- `gate`: the one place through which replies leave. It refuses what the policy forbids or the list lacks.
- `limits`: how few rows and steps, and how many rounds and requests, a device accepts ([limits] of a device).
- `ledger`: one row for everything that crossed, or was refused, in both directions.
- `contents`: the SHA-256 of what crosses, for the audit log.
- `audit`: the signed and chained log of a device, and its verification.
"""
