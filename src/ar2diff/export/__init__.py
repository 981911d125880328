"""Converted models in the formats of other engines, each with a strict offline verifier."""
