"""Downloads against a real server on this machine: checked, atomic, and honest about failure."""

from __future__ import annotations

import hashlib
import io
import socket
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from fairpate.data import REGISTRY, DataError, entry_for
from fairpate.data.dataset import SourceFile
from fairpate.data.registry import fetch
from fairpate.terminal import Reporter

CONTENT = b"age,sex\n" + b"1,2\n" * 100_000


def archive_of(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


PAGES = {
    "/toy.csv": CONTENT,
    "/damaged.csv": CONTENT[:-1] + b"!",
    "/toy.zip": archive_of(toy=CONTENT),
    "/other.zip": archive_of(other=CONTENT),
}


class Publisher(BaseHTTPRequestHandler):
    """Serves PAGES; `/short.csv` promises more than it sends, and `/moved.csv` redirects."""

    def do_GET(self) -> None:
        if self.path == "/moved.csv":
            self.send_response(302)
            self.send_header("Location", "/toy.csv")
            self.end_headers()
            return
        content = PAGES.get(self.path) if self.path != "/short.csv" else CONTENT[:1000]
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT) if self.path == "/short.csv" else len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Stay quiet."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Publisher) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def offer(monkeypatch: pytest.MonkeyPatch, *files: SourceFile) -> None:
    """Let the data set `toy` consist of ``files``."""
    toy = replace(entry_for("heart"), name="toy", files=files, options={})
    monkeypatch.setattr("fairpate.data.registry.REGISTRY", {**REGISTRY, "toy": toy})


def source(url: str | None, **changes: str) -> SourceFile:
    file = SourceFile(path="toy/toy.csv", sha256=hashlib.sha256(CONTENT).hexdigest(), url=url)
    return file.model_copy(update=changes)


@pytest.mark.parametrize("page", ["toy.csv", "moved.csv"])
def test_a_file_is_downloaded_and_kept(
    address: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, source(f"{address}/{page}"))
    (path,) = fetch("toy", tmp_path / "new")
    assert path == tmp_path / "new" / "toy" / "toy.csv"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["toy.csv"]


def test_progress_is_plain_lines_in_a_log_and_a_bar_on_a_terminal(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, source(f"{address}/toy.csv"))
    log, terminal = io.StringIO(), io.StringIO()
    for folder, shown in (
        ("log", Console(file=log, force_terminal=False)),
        ("terminal", Console(file=terminal, force_terminal=True)),
    ):
        fetch("toy", tmp_path / folder, stage=Reporter(shown).stage)
    assert "toy.csv" in log.getvalue()
    assert "done in" in log.getvalue()
    assert "\x1b" not in log.getvalue()
    assert "\x1b" in terminal.getvalue()


def test_a_member_is_taken_out_of_its_archive(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, source(f"{address}/toy.zip", member="toy"))
    (path,) = fetch("toy", tmp_path)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["toy.csv"]


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, source("http://127.0.0.1:9/never"))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.csv").write_bytes(CONTENT)
    assert fetch("toy", tmp_path) == (tmp_path / "toy" / "toy.csv",)


def test_a_damaged_file_that_is_there_is_refused_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, source("http://127.0.0.1:9/never"))
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "toy.csv").write_bytes(b"mine")
    with pytest.raises(DataError, match="damaged or other file: expected sha256"):
        fetch("toy", tmp_path)
    assert (tmp_path / "toy" / "toy.csv").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("page", "member", "message"),
    [
        ("damaged.csv", None, r"damaged\.csv: damaged download of toy\.csv: expected sha256 \w{64}, found \w{64}"),
        ("short.csv", None, r"short\.csv: cannot be reached .*toy\.csv .*into"),
        ("absent.csv", None, r"absent\.csv: cannot be reached .*404.*toy\.csv"),
        ("other.zip", "toy", r"other\.zip: expected a zip archive with toy in it"),
        ("toy.csv", "toy", r"toy\.csv: expected a zip archive with toy in it"),
    ],
)
def test_a_bad_download_leaves_nothing(
    address: str, page: str, member: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, source(f"{address}/{page}", member=member))
    with pytest.raises(DataError, match=message):
        fetch("toy", tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []


def test_without_a_network_the_error_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/toy.csv"
    offer(monkeypatch, source(url))
    with pytest.raises(DataError) as caught:
        fetch("toy", tmp_path)
    for part in (url, "cannot be reached", "toy.csv", f"put it into {tmp_path / 'toy'}."):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["utkface", "fairface", "celeba", "chexpert"])
def test_a_registration_is_explained_before_anything_starts(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"{name} cannot be fetched without its publisher's consent\. .*https://.*Put "
    ):
        fetch(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_the_files_of_the_chosen_options_are_needed() -> None:
    assert [file.path for file in entry_for("folktables").needed_files({"state": "AL"})] == ["folktables/psam_p01.csv"]
    assert [file.path for file in entry_for("acs").needed_files({"excerpt": "ma2019"})] == ["acs/ma2019.csv"]
