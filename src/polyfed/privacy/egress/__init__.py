"""What may leave a client, and what has left it: policy, announcement, gate, ledger, audit log."""
