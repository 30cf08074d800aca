"""Audit logs: chains of signed lines about what left, their keys and proofs, and the receipts that both sides sign."""
