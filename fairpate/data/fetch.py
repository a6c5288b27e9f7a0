"""Files from their publishers, checked before they are kept.

A download goes to a temporary name, its sha256 is compared with the pinned one, and only then it takes its place; a
damaged or interrupted download leaves nothing behind. Data sets behind a registration are not downloaded: the error
says what to do. Progress is a bar on a terminal and plain lines in a log.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from fairpate.data.entry import DataError, SourceFile
from fairpate.data.files import check_archive, find, how_to_get, locate, read_bytes, sha256_of
from fairpate.data.registry import find_entry

TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 18
# Else a server may compress on the way, httpx unpacks, and the bytes are not those of the checksum.
AS_PUBLISHED = {"accept-encoding": "identity"}
LINES_PER_FILE = 10


def fetch(
    name: str, data_dir: Path, *, options: Mapping[str, Any] | None = None, console: Console | None = None
) -> tuple[Path, ...]:
    """Download what data set ``name`` needs into ``data_dir`` and return the paths of its files.

    A file that is there and undamaged is kept. :class:`DataError` names the address, the file and the folder to put
    it into where it cannot be downloaded, arrives damaged, or needs a registration (said before anything starts).
    """
    console = console or Console(stderr=True)
    files = find_entry(name).needed_files(options or {})
    missing = [file for file in files if not _is_there(file, data_dir)]
    by_hand = [how_to_get(file, data_dir) for file in missing if file.url is None]
    if by_hand:
        raise DataError(
            f"{name} cannot be fetched without its publisher's consent. " + " ".join(dict.fromkeys(by_hand))
        )
    for file in missing:
        _download(file, data_dir, console)
    return tuple(locate(file, data_dir)[1] for file in files)


def _is_there(file: SourceFile, data_dir: Path) -> bool:
    found = find(file, data_dir)
    if found is None:
        return False
    choice, path = found
    # The checksum is of the published bytes: a gzipped copy has to be unpacked for it.
    if path.name == Path(choice.path).name and path.is_file():
        check_archive(choice, path)
    elif path.is_file():
        read_bytes(choice, data_dir)
    return True


def _download(file: SourceFile, data_dir: Path, console: Console) -> None:
    target = data_dir / file.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # On the file system of the target, so that its place is taken in one step.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            partial = Path(scratch) / target.name
            _stream(file, partial, console)
            content = partial if file.member is None else _extract(file, partial)
            found = sha256_of(content)
            if file.sha256 not in (None, found):
                raise DataError(
                    f"{file.url}: damaged download of {target.name}: expected sha256 {file.sha256}, found {found}; "
                    "nothing was kept. Try again, or compare with the publisher's page."
                )
            content.replace(target)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{file.url}: cannot be reached ({reason}). Where this machine has no network, get {target.name} on "
            f"another one and put it into {target.parent}."
        ) from error
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error}); choose another data folder or free space.") from error
    console.print(f"{target.name}: kept, sha256 {found}", highlight=False)


def _stream(file: SourceFile, partial: Path, console: Console) -> None:
    assert file.url is not None
    with (
        httpx.stream("GET", file.url, headers=AS_PUBLISHED, follow_redirects=True, timeout=TIMEOUT_S) as response,
        partial.open("wb") as stream,
    ):
        response.raise_for_status()
        total = int(response.headers.get("content-length", 0)) or None
        with _progress(Path(file.path).name, total, console) as advance:
            for chunk in response.iter_bytes(CHUNK_BYTES):
                stream.write(chunk)
                advance(len(chunk))


def _extract(file: SourceFile, archive: Path) -> Path:
    """The wanted member of a downloaded archive, beside it."""
    assert file.member is not None
    member = archive.with_name("member")
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(file.member) as source, member.open("wb") as stream:
            shutil.copyfileobj(source, stream)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{file.url}: expected a zip archive with {file.member} in it ({error}); try again.") from error
    return member


@contextmanager
def _progress(name: str, total: int | None, console: Console) -> Iterator[Callable[[int], None]]:
    """A function that is told of every chunk's bytes, and shows them."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)
        return
    done = 0
    printed = 0

    def advance(count: int) -> None:
        nonlocal done, printed
        done += count
        step = LINES_PER_FILE * done // total if total else 0
        if step > printed:
            printed = step
            console.print(f"{name}: {100 * done // (total or done)} % of {total} bytes", highlight=False)

    yield advance
