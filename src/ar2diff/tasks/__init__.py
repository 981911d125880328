"""Benchmarks: what is asked and what counts as right, one definition for evaluation and decontamination."""
