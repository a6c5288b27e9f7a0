import pytest


@pytest.fixture(autouse=True)
def sites_ask_often(monkeypatch):
    """A site that waits asks every fifth of a second; by itself, every two seconds."""
    monkeypatch.setattr("fairpate.sites.site._LONGEST_PAUSE_S", 0.2)
