"""The run that all audit tests share."""

import pytest
from made_run import MadeRun, copy_run, make_run


@pytest.fixture(scope="session")
def made_run(tmp_path_factory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def copied(made_run, tmp_path):
    return copy_run(made_run.folder, tmp_path / "copied")
