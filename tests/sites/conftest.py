from functools import lru_cache

import pytest

from fairpate.sites import secure_sum


@pytest.fixture(autouse=True)
def sites_ask_often(monkeypatch):
    """A site that waits asks every fifth of a second; by itself, every two seconds."""
    monkeypatch.setattr("fairpate.sites.site._LONGEST_PAUSE_S", 0.2)


@pytest.fixture(scope="session", autouse=True)
def _signatures_are_verified_once():
    """All parties of a sum in one process would verify the same signatures and derive the same secrets: half the time
    of their tests."""
    exchange = secure_sum._exchanged
    by_bytes = lru_cache(2**14)(
        lambda own, other, place: exchange(secure_sum.X25519PrivateKey.from_private_bytes(own), other, place)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(secure_sum.PublicKeys, "signed", lru_cache(2**14)(secure_sum.PublicKeys.signed))
        patched.setattr(secure_sum, "_exchanged", lambda own, *other: by_bytes(own.private_bytes_raw(), *other))
        yield
