"""Certificates of a cluster's nodes: whom Python's own TLS lets in with them, and what the command refuses."""

import json
import os
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fairpate.cli import main
from fairpate.types import UsageError
from teachers.certificates import CertificateError, make_authority, make_node_certificate, variables


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with two nodes, and another authority with one."""
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder / "authority", days=10)
    make_authority(folder / "other", days=10)
    make_node_certificate(folder / "authority", folder / "node", ["10.0.0.1", "head.example"], days=5)
    make_node_certificate(folder / "authority", folder / "second", ["fd00::2"], days=5)
    make_node_certificate(folder / "other", folder / "foreign", ["10.0.0.1"], days=5)
    return folder


def greeted(server_folder: Path, client_folder: Path | None, name: str) -> bool:
    """Whether a client of ``name`` and a server, each with the certificate in its folder, accept each other, as Ray's
    nodes ask it of each other."""
    authority = str(server_folder / "ca.crt")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    server.load_cert_chain(server_folder / "node.crt", server_folder / "node.key")
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.create_default_context(cafile=authority)
    if client_folder is not None:
        client.load_cert_chain(client_folder / "node.crt", client_folder / "node.key")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)

        def serve() -> None:
            try:
                with server.wrap_socket(theirs, server_side=True) as stream:
                    stream.sendall(b"welcome")
            except OSError:
                theirs.close()

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            with client.wrap_socket(ours, server_hostname=name) as stream:
                return stream.recv(7) == b"welcome"
        except OSError:
            return False
        finally:
            ours.close()
            serving.join()


def test_nodes_of_one_authority_accept_each_other_by_the_dialled_address_and_nobody_else(made: Path) -> None:
    node, second = made / "node", made / "second"
    for name in ("10.0.0.1", "head.example", "127.0.0.1", "localhost", "::1"):
        assert greeted(node, second, name), name
    assert greeted(second, node, "fd00::2")
    assert not greeted(node, second, "10.0.0.2")
    assert not greeted(node, second, "example")
    assert not greeted(node, None, "10.0.0.1")
    assert not greeted(node, made / "foreign", "10.0.0.1")


def test_files_are_for_their_owner_alone_and_a_nodes_folder_has_no_key_of_the_authority(made: Path) -> None:
    for folder in (made / "authority", made / "node"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for key in folder.glob("*.key"):
            assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(path.name for path in (made / "node").iterdir()) == ["ca.crt", "node.crt", "node.key"]
    assert {Path(value).exists() for name, value in variables(made / "node").items() if "TLS_" in name} == {True}


def test_a_node_cannot_sign_for_others(made: Path) -> None:
    own = x509.load_pem_x509_certificate((made / "node" / "node.crt").read_bytes())
    assert own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    authority = x509.load_pem_x509_certificate((made / "authority" / "ca.crt").read_bytes())
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    own.verify_directly_issued_by(authority)
    if openssl := shutil.which("openssl"):  # by its strictest rules
        strict = [openssl, "verify", "-x509_strict", "-CAfile", str(made / "authority" / "ca.crt")]
        subprocess.run([*strict, str(made / "node" / "node.crt")], check=True, capture_output=True)  # noqa: S603


def test_a_node_ends_no_later_than_its_authority(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "authority", days=3)
    node = make_node_certificate(tmp_path / "authority", tmp_path / "node", ["10.0.0.1"], days=400)
    assert node.ends == authority.ends
    assert timedelta(days=2) < node.ends - datetime.now(UTC) <= timedelta(days=3)


def test_an_authority_is_not_replaced_and_a_node_gets_a_new_key_each_time(tmp_path: Path) -> None:
    make_authority(tmp_path / "authority", days=3)
    before = {path: path.read_bytes() for path in (tmp_path / "authority").iterdir()}
    with pytest.raises(UsageError, match=r"DIR: .* has the authority of a cluster already \(ca.crt, ca.key\)"):
        make_authority(tmp_path / "authority", days=3)
    assert {path: path.read_bytes() for path in before} == before
    keys = []
    for address in ("10.0.0.1", "10.0.0.2"):
        make_node_certificate(tmp_path / "authority", tmp_path / "node", [address], days=3)
        keys.append((tmp_path / "node" / "node.key").read_bytes())
    assert keys[0] != keys[1]
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "ca.key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"\(ca.key\)"):
        make_authority(tmp_path / "link", days=3)


@pytest.mark.parametrize("address", ["10.0.0.300", "1.2.3", "a b", "", "-a", "http://a", "*.example"])
def test_what_is_no_address_is_refused(made: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="--address: "):
        make_node_certificate(made / "authority", tmp_path / "node", [address], days=3)
    assert not (tmp_path / "node").exists()


def test_an_authority_that_cannot_sign_is_named(made: Path, tmp_path: Path) -> None:
    def refused(folder: Path, words: str) -> None:
        with pytest.raises(CertificateError, match=words):
            make_node_certificate(folder, tmp_path / "node", ["10.0.0.1"], days=3)

    refused(tmp_path, "has no authority: no ca.crt in it")
    refused(made / "node", "has no authority: no ca.key in it")
    mixed = shutil.copytree(made / "authority", tmp_path / "mixed")
    shutil.copy(made / "other" / "ca.key", mixed)
    refused(mixed, "are not of one authority")
    (mixed / "ca.key").write_text("no key", encoding="utf-8")
    refused(mixed, "a file of it is damaged")


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fairpate", "cluster", "certificates", *words])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_the_command_prints_the_variables_that_ray_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, node = str(tmp_path / "authority"), str(tmp_path / "node")
    assert typed(monkeypatch, authority) == 0
    assert typed(monkeypatch, authority) == 2
    assert typed(monkeypatch, authority, "--address", "10.0.0.1") == 2
    assert typed(monkeypatch, authority, "--node", node, "--address", "10.0.0.999") == 2
    assert typed(monkeypatch, node, "--node", node, "--address", "10.0.0.1") == 1
    capsys.readouterr()
    assert typed(monkeypatch, authority, "--node", node, "--address", "10.0.0.1") == 0
    lines = dict(line.split("=") for line in capsys.readouterr().out.splitlines())
    assert lines == variables(tmp_path / "node")
    assert typed(monkeypatch, authority, "--node", node, "--address", "10.0.0.1", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["addresses"] == ["10.0.0.1", "localhost", "127.0.0.1", "::1"]
    assert facts["environment"] == lines
    if os.geteuid() != 0:
        (tmp_path / "authority" / "ca.key").chmod(0)
        assert typed(monkeypatch, authority, "--node", node, "--address", "10.0.0.1") == 1
