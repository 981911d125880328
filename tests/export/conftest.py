"""The models that the formats are made from, and their exports, each made once."""

import pytest
from export_kit import ORIGINS, split_like_smollm, write_model

from ar2diff.export.export import ExportOptions, export_model


@pytest.fixture(scope="session")
def origin(tmp_path_factory):
    """The converted model that a target is exported from, made once."""
    made = {}

    def make(target):
        if target not in made:
            made[target] = write_model(tmp_path_factory.mktemp(target), *ORIGINS[target])
            if target == "gguf":
                split_like_smollm(made[target])
        return made[target]

    return make


@pytest.fixture(scope="session")
def exported(origin, tmp_path_factory):
    """The export of `origin(target)`, made once; copy before changing it."""
    made = {}

    def make(target):
        if target not in made:
            made[target] = tmp_path_factory.mktemp("exports") / target
            export_model(origin(target), target, made[target], ExportOptions(quantisation="f32"))
        return made[target]

    return make
