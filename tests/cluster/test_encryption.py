"""What somebody between two nodes of a cluster hears, and who is let in: with the certificates of
`fairpate cluster certificates`, and without."""

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import Cluster

from teachers.certificates import make_authority, make_node_certificate

WIRE = Path(__file__).parent / "wire.py"
NO_ROOT = "only root can listen to a network, and make namespaces"

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.usefixtures("light_runs"),
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason=NO_ROOT),
]


class Listener:
    """Everything that TCP connections carry over one device of this machine, as long as the block lasts."""

    def __init__(self, device: str):
        self._device = device
        self._streams: dict[bytes, bytearray] = defaultdict(bytearray)

    def __enter__(self) -> "Listener":
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 256 * 2**20)  # SO_RCVBUFFORCE: nothing may be missed
        self._socket.bind((self._device, 0))
        self._socket.settimeout(0.2)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        _received, self.dropped = struct.unpack("II", self._socket.getsockopt(263, 6, 8))  # PACKET_STATISTICS
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                packet, (_, _, kind, *_) = self._socket.recvfrom(2**18)
            except TimeoutError:
                if self._is_over.is_set():
                    return
                continue
            # The loopback device shows each packet twice, as sent and as received.
            if (self._device == "lo" and kind == socket.PACKET_OUTGOING) or packet[0] >> 4 != 4 or packet[9] != 6:
                continue
            header = (packet[0] & 15) * 4
            start = header + (packet[header + 12] >> 4) * 4
            self._streams[packet[12:20] + packet[header : header + 4]] += packet[
                start : int.from_bytes(packet[2:4]) or None
            ]

    def heard(self, samples: list[str]) -> int:
        """How many of these bytes, given as hexadecimal digits, were in what any connection carried."""
        return sum(any(bytes.fromhex(each) in stream for stream in self._streams.values()) for each in samples)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._streams.values()))

    @property
    def in_clear(self) -> list[bytes]:
        """The beginnings of streams that are not records of TLS (RFC 8446, 5.1), which begin by their type and 3."""
        return [
            bytes(each[:40])
            for each in self._streams.values()
            if each and not (0x14 <= each[0] <= 0x17 and each[1] == 3)
        ]


def listened_to(cluster: Cluster) -> tuple[Listener, dict[str, list[str]]]:
    """What was heard of a small training with its votes, and what was sent."""
    with Listener(cluster.link) as listener:
        done = subprocess.run(  # noqa: S603 our own program
            cluster.command(sys.executable, str(WIRE)),
            env=cluster.environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert listener.dropped == 0
    sent = json.loads(done.stdout)
    assert {name: len(found) for name, found in sent.items()} == {"records": 200, "weights": 4, "votes": 4}
    return listener, sent | {"token": [cluster.environment["RAY_AUTH_TOKEN"].encode().hex()]}


@pytest.fixture(scope="module")
def encrypted() -> Iterator[Cluster]:
    cluster = Cluster(1, namespaces=True, is_encrypted=True)
    cluster.environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(cluster)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield cluster


def test_with_certificates_a_listener_hears_no_record_no_weights_no_vote_and_no_token(encrypted: Cluster) -> None:
    listener, sent = listened_to(encrypted)
    assert listener.num_bytes > 200 * 4000  # the records did pass by
    assert listener.in_clear == []
    assert {name: listener.heard(samples) for name, samples in sent.items()} == dict.fromkeys(sent, 0)


def test_without_certificates_a_listener_hears_all_of_them(cluster: Cluster) -> None:
    """The same ears, the same training: what the test above does not find would be found."""
    listener, sent = listened_to(cluster)
    heard = {name: listener.heard(samples) for name, samples in sent.items()}
    assert listener.in_clear
    assert heard["records"] > 180
    assert (heard["weights"], heard["votes"], heard["token"]) == (4, 4, 1)


KNOCK = """
import json, socket, ssl, sys

host, authority, folders = sys.argv[1], sys.argv[2], sys.argv[3:]
ports = json.load(sys.stdin)
greeting = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of every gRPC client
answers = {}
for folder in folders:
    for port in ports:
        try:
            with socket.create_connection((host, port), 10) as plain:
                if folder == "plain":
                    plain.sendall(greeting)
                    answer = plain.recv(9)
                else:
                    context = ssl.create_default_context(cafile=authority)
                    context.set_alpn_protocols(["h2"])
                    if folder != "none":
                        context.load_cert_chain(f"{folder}/node.crt", f"{folder}/node.key")
                    with context.wrap_socket(plain, server_hostname=host) as wrapped:
                        wrapped.sendall(greeting)
                        answer = wrapped.recv(9)
        except OSError:
            answer = b""
        answers[f"{folder} {port}"] = answer[3:4] == bytes([4])  # SETTINGS: it talks
print(json.dumps(answers))
"""


def ports_of(cluster: Cluster, number: int) -> dict[int, str]:
    """The ports on which a node listens for others, with the process."""
    command = [*cluster.nodes[number].prefix, "ss", "--listening", "--tcp", "--numeric", "--processes", "--no-header"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    rows = [line.split() for line in found.splitlines()]
    return {
        int(row[3].rpartition(":")[2]): row[-1].split('"')[1]
        for row in rows
        if not row[3].startswith(("127.", "[::1]", "[::ffff:127."))
    }


def test_a_stranger_between_the_nodes_gets_no_answer_from_ray_without_a_certificate(
    encrypted: Cluster, tmp_path: Path
) -> None:
    """From the other node: without encryption, without a certificate, with one of another authority, and with one."""
    make_authority(tmp_path / "other", days=1)
    make_node_certificate(tmp_path / "other", tmp_path / "foreign", ["10.231.0.2"], days=1)
    own = Path(encrypted.certified("10.231.0.2")["RAY_TLS_SERVER_CERT"]).parent
    ports = ports_of(encrypted, 0)
    assert {"gcs_server", "raylet"} <= set(ports.values())
    knockers = ["plain", "none", str(tmp_path / "foreign"), str(own)]
    command = [sys.executable, "-c", KNOCK, "10.231.0.1", str(own / "ca.crt"), *knockers]
    asked = subprocess.run(  # noqa: S603 our own program
        [*encrypted.workers[0].prefix, *command], input=json.dumps([*ports]), capture_output=True, text=True, check=True
    )
    answers = json.loads(asked.stdout)
    talks = {knocker: {port for port in ports if answers[f"{knocker} {port}"]} for knocker in knockers}
    assert [talks[knocker] for knocker in knockers[:3]] == [set(), set(), set()]
    assert {"gcs_server", "raylet"} <= {ports[port] for port in talks[str(own)]}


def test_a_node_without_a_certificate_does_not_join(encrypted: Cluster) -> None:
    """It has the token, which alone is enough without encryption."""
    environment = {name: value for name, value in encrypted.environment.items() if "TLS" not in name}
    command = [*encrypted.workers[0].prefix, str(Path(sys.executable).with_name("ray")), "start", "--block"]
    command += [f"--address={encrypted.environment['RAY_ADDRESS']}", "--node-ip-address=10.231.0.2", "--num-cpus=1"]
    with subprocess.Popen(  # noqa: S603
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as node:
        assert node.stderr is not None
        said = next(line for line in node.stderr if "Failed to connect to GCS" in line)  # and so for minutes
        node.kill()
    assert encrypted.environment["RAY_ADDRESS"] in said
    encrypted.wait_until(2)
