"""`ar2diff audit`: every claim of a run recomputed, offline, from its files and its ledger."""
