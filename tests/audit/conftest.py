"""The run that all audit tests share."""

import pytest
from made_run import MadeRun, copy_run, evaluate_over_server, make_run


@pytest.fixture(scope="session")
def made_run(tmp_path_factory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def copied(made_run, tmp_path):
    return copy_run(made_run.folder, tmp_path / "copied")


@pytest.fixture(scope="session")
def served_run(made_run, tmp_path_factory) -> MadeRun:
    """The same run, evaluated again over a server."""
    scratch = tmp_path_factory.mktemp("served")
    made = MadeRun(copy_run(made_run.folder, scratch / "run"), made_run.signer)
    evaluate_over_server(made, scratch)
    return made
