"""What a client sends once: a charge whose reply was lost is not asked for a second time."""

from __future__ import annotations

import socket
import threading
from urllib.parse import quote

import pytest

from aggregator.client import AggregatorClient, QueryError

pytestmark = pytest.mark.usefixtures("light_runs")


@pytest.mark.parametrize("key", ["\x01", "../budget", "a b?c#d", "é"])
def test_a_key_that_is_none_is_asked_for_as_it_is_and_never_ends_a_shell(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        heard: list[bytes] = []

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                heard.append(connection.recv(65536).split(b" ")[1])
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with AggregatorClient(url) as client, pytest.raises(QueryError, match="status 404"):
            client.reply(key)
        thread.join(5)
    assert heard == [f"/v1/queries/{quote(key, safe='')}".encode()]


def test_a_request_whose_reply_was_lost_is_sent_again() -> None:
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    heard.append(connection.recv(65536).split(b" ")[0])

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with (
            AggregatorClient(url, attempts=3, first_pause_s=0.01) as client,
            pytest.raises(QueryError, match="no service answers"),
        ):
            client.budget()
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert len(heard) == 3
