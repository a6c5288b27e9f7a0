"""What is said when the head of a cluster goes away, against a real socket."""

import logging
import socket
import time
from collections.abc import Callable

import pytest

from teachers.cluster import HeadWatch

LIMIT_S = 20.0


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def wait_until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < limit, "nothing was said"
        time.sleep(0.01)


def test_a_head_that_goes_away_and_comes_back_is_told_of_once_each(caplog: pytest.LogCaptureFixture) -> None:
    head = listening()
    port = head.getsockname()[1]
    with caplog.at_level(logging.WARNING), HeadWatch(f"127.0.0.1:{port}", interval_s=0.02):
        time.sleep(0.2)
        assert not caplog.messages
        head.close()
        wait_until(lambda: len(caplog.messages) == 1)
        time.sleep(0.2)
        assert len(caplog.messages) == 1
        assert f"127.0.0.1:{port}, does not answer" in caplog.messages[0]
        with listening(port):
            wait_until(lambda: len(caplog.messages) == 2)
    assert "answers again" in caplog.messages[1]
