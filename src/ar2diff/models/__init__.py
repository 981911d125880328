"""One decoder for every supported family, and strict loading of its weights."""
