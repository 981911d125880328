"""The record of a run: an append-only, hash-chained ledger, and the documents generated from it."""
