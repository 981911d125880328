"""Benchmarks: what is asked, what counts as right, and in which version; evaluation and decontamination share them."""
