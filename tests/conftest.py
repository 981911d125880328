"""What every test gets: a signing key of its own, never the user's."""

import pytest


@pytest.fixture(autouse=True)
def _own_config_home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config-home"))
