"""Converted models in the formats of engines that run on many machines."""
