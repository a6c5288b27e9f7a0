"""Jobs of a Ray cluster: a command of this package runs on the cluster's head, is followed from here, and what it
publishes is fetched.

A job is submitted to the dashboard of the head by Ray's job API. The cluster has this package and the data; only the
configurations that the command names, and the modules of the user's own classes, are sent. What is fetched is the
public folder of a run, or the public files of a comparison, by a second job that prints them: nothing below
``private/`` leaves the cluster.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import secrets
import shlex
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from fairpate.config import ConfigError, apply_override, flattened, read_yaml
from fairpate.files import PlaceError, check_output, make_folder, write_atomically
from fairpate.terminal import say
from fairpate.types import UsageError, UserError
from teachers.ray_cluster import job_client
from teachers.work import PoolError

_SILENCE_LIMIT_S = 60.0  # of a dashboard that has answered before
_FIRST_LOOK_S, _RAREST_LOOK_S = 0.5, 3.0
_FACTS = "fairpate"  # in the metadata of a job
_RECORD = "job.json"
_PUBLIC = {"run": ("public",), "compare": ("results.parquet", "report.html", "figures")}
_PATHS = {"data_dir", "declaration", "path", "release_of", "storage", "test", "weights"}
"""Last names of the configuration fields that name a file or a folder."""
_OWN_CLASS = re.compile(r"\b([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_]")  # module:Class, a name of the user's own


class JobError(UserError):
    """Raised if a job cannot be submitted, followed or fetched; the message names the address and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of this package for a cluster.

    ``command`` is its name, ``words`` the rest of its line. ``out`` is the folder on the head that it writes; None if
    it writes none. ``to`` is the folder on this machine for what it publishes. ``sent`` are files of this machine by
    the names that they have in the job's working directory. ``on_head`` are files and folders that the head must have,
    by the names of their fields.
    """

    command: str
    words: tuple[str, ...]
    out: str | None
    to: str
    sent: Mapping[str, Path] = field(default_factory=dict)
    on_head: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The command as a user would type it on the head."""
        return shlex.join(["fairpate", self.command, *self.words])

    @property
    def entrypoint(self) -> str:
        """The shell line of the job: ends with exit code 2 if the head lacks a file, and runs the command otherwise."""
        checks = []
        for name, path in self.on_head.items():
            words = f"error {name}: {path} is not on the head of the cluster; copy it there, or give the path it has."
            checks.append(f"test -e {shlex.quote(path)} || {{ echo {shlex.quote(words)} >&2; exit 2; }}")
        return "; ".join([*checks, f"exec {self.line}"])


def plan_job(command: str, words: Sequence[str], values: Mapping[str, Any], *, to: Path | None) -> Job:
    """Return the job of ``fairpate COMMAND WORDS``, where ``values`` are the parsed arguments by their Python names.

    ``to``: the folder on this machine for what is published; None: ``runs/NAME``, after the folder on the head.
    UsageError if the command reads something that only this machine has, or writes where the cluster would delete it.
    """
    if command not in _PUBLIC:
        raise UsageError(f"COMMAND: expected run or compare, got {command}; a job runs one of these.")
    if values.get("figures") is not None:
        raise UsageError(
            "--figures: not read in a job; draw figures here, from the results.parquet that is fetched at the end."
        )
    sent: dict[str, Path] = {}
    words, config = [*words], values.get("config")
    options = {f"--{name.replace('_', '-')}": value for name, value in values.items() if name in _PATHS}
    if str(values.get("data", "")).endswith((".yaml", ".yml")):
        options["--data"] = values["data"]
    settings = flattened(apply_override({}, *(values.get("overrides") or [])))
    if config is not None:
        words = [config.name if Path(word) == config else word for word in words]
        settings = _sent_with(config, config.parent, sent) | settings
    texts = [*words, *(path.read_text(encoding="utf-8") for path in sent.values())]
    for module in {found[1] for text in texts for found in _OWN_CLASS.finditer(text)}:
        if (path := Path(f"{module}.py")).is_file():
            sent[path.name] = path
    paths = {name: value for name, value in settings.items() if name.rpartition(".")[2] in _PATHS} | options
    on_head = {}
    for name, value in paths.items():
        if not isinstance(value, (str, Path)) or str(value) in ("", "imagenet") or "://" in str(value):
            continue
        if not PurePosixPath(str(value)).is_absolute():
            raise UsageError(
                f"{name}: {value} lies on this machine alone, and the job runs on the cluster; copy it to the head or "
                "to storage that the head mounts, and give the absolute path that it has there."
            )
        if name.rpartition(".")[2] != "storage":  # which a run makes
            on_head[name] = str(value)
    out = values.get("out") or settings.get("out")
    if values.get("dry_run"):
        out = None
    elif out is None or not PurePosixPath(str(out)).is_absolute():
        raise UsageError(
            f"--out: {'missing' if out is None else f'{out} is relative'}; give the absolute path of a folder on the "
            "cluster's head. The working directory of a job is deleted after the job."
        )
    place = to or Path("runs") / PurePosixPath(str(out)).name
    if out is not None:
        require_place(place)
    return Job(
        command=command,
        words=tuple(words),
        out=None if out is None else str(out),
        to=str(place.absolute()),
        sent=sent,
        on_head=on_head,
    )


def _sent_with(config: Path, folder: Path, sent: dict[str, Path]) -> dict[str, Any]:
    """Add ``config``, and the configurations that it names, to ``sent``, by their paths in ``folder``; return their
    fields by dotted names."""
    found = flattened(read_yaml(config))
    sent[str(config.relative_to(folder))] = config
    for name, value in list(found.items()):
        if name.startswith("data_sets.") and name.endswith(".file") and isinstance(value, str):
            if PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts:
                raise ConfigError(
                    f"{name}: {value} is outside of {folder}, which is sent with the job; put it there, and give its "
                    "relative path."
                )
            found |= {f"{name}: {inner}": each for inner, each in _sent_with(folder / value, folder, sent).items()}
    return found


def require_place(folder: Path) -> None:
    """Raise PlaceError unless what a job publishes may be written to ``folder``: a new folder, an empty one, or that of
    an earlier job."""
    check_output(folder, "--to")
    if folder.is_dir() and not (folder / _RECORD).exists() and any(folder.iterdir()):
        raise PlaceError(f"--to: {folder} is not empty and was not fetched from a job; give another folder with --to.")


class Cluster:
    """The job server at ``address``, the dashboard of a cluster's head; errors as in
    :func:`teachers.ray_cluster.job_client`."""

    def __init__(self, address: str):
        self.address = address if "://" in address else f"http://{address}"
        self._client = job_client(self.address)
        parts = urlsplit(self.address)
        if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            say(f"{self.address}: HTTP is not encrypted, and carries the token; forward the dashboard's port instead.")

    def come_back(self, job: str) -> str:
        """What to type to see a job again, and to end it."""
        return (
            f"`fairpate cluster follow {job} --on {self.address}` shows it again and fetches what it publishes; "
            f"`fairpate cluster stop {job} --on {self.address}` ends it"
        )

    def submit(self, job: Job) -> str:
        """Submit a job and return its name. JobError if the cluster does not take it."""
        with tempfile.TemporaryDirectory(prefix="fairpate-job-") as folder:
            for name, path in job.sent.items():
                place = Path(folder) / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
            told = {name: value for name, value in asdict(job).items() if name in ("command", "words", "out", "to")}
            return self._submitted(
                entrypoint=job.entrypoint,
                runtime_env={"working_dir": folder} if job.sent else {},
                metadata={_FACTS: json.dumps(told)},
            )

    def _submitted(self, **values: Any) -> str:
        try:
            return str(self._client.submit_job(**values))
        except PoolError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise JobError(f"{self.address}: the cluster does not take the job: {error}") from error

    def jobs(self) -> list[Any]:
        """The jobs that were submitted by this module, newest first, as Ray describes them."""
        found = [each for each in self._client.list_jobs() if _FACTS in (each.metadata or {})]
        return sorted(found, key=lambda each: each.start_time or 0, reverse=True)

    def stop(self, job: str) -> bool:
        """Ask a job to end; return whether it was running."""
        self.told(job)
        return bool(self._client.stop_job(job))

    def told(self, job: str) -> Job:
        """Return what was submitted as ``job``. JobError for a job that this module did not submit."""
        try:
            metadata = self._client.get_job_info(job).metadata or {}
        except PoolError:
            raise
        except RuntimeError as error:
            raise JobError(f"{job}: no such job at {self.address}; `fairpate cluster jobs` lists them.") from error
        if _FACTS not in metadata:
            raise JobError(f"{job}: not submitted by `fairpate cluster submit`; `ray job logs {job}` shows its log.")
        return Job(**json.loads(metadata[_FACTS]))

    def follow(self, job: str, show: Callable[[str], object], *, at_end: bool = False) -> tuple[int, str]:
        """Hand each line of a job's log to ``show`` until the job ends; return its exit code, and in words why it
        failed. JobError if the dashboard is silent for a minute.

        ``at_end``: not before the job ends. Ray sends a log from its beginning each time."""
        shown, pause_s, answered_s = 0, _FIRST_LOOK_S, time.monotonic()
        while True:
            try:
                # In this order: the log of a job that has ended is complete.
                info = self._client.get_job_info(job)
                has_ended = info.status.is_terminal()
                log = str(self._client.get_job_logs(job)) if has_ended else "" if at_end else self._log(job)
                answered_s = time.monotonic()
            except (OSError, RuntimeError) as error:
                if time.monotonic() > answered_s + _SILENCE_LIMIT_S:
                    words = f"{self.address} does not answer any more; the job goes on: {self.come_back(job)}."
                    raise JobError(words) from error
                time.sleep(_RAREST_LOOK_S)
                continue
            lines = log[shown:].splitlines(keepends=True)
            if lines and not has_ended and not lines[-1].endswith("\n"):
                lines.pop()  # its rest is still to come
            for line in lines:
                show(line.rstrip("\n"))
            shown += sum(map(len, lines))
            if has_ended:
                break
            pause_s = _FIRST_LOOK_S if lines else min(1.5 * pause_s, _RAREST_LOOK_S)
            time.sleep(pause_s)
        if info.status.value == "SUCCEEDED":
            return 0, ""
        if info.status.value == "STOPPED":
            return 1, f"{job} was stopped; submit the same command again to resume"
        code = info.driver_exit_code
        # A signal's number is negative; Ray did not start the command at all where there is no code.
        status = 1 if not code else 128 - code if code < 0 else code
        why = f"exit code {status}" if code else info.message
        return status, f"{job} failed ({why}); its log is above"

    def _log(self, job: str) -> str:
        try:
            return str(self._client.get_job_logs(job))
        except RuntimeError:  # there is none yet
            return ""

    def fetch(self, job: str, told: Job, *, has_failed: bool = False) -> list[str]:
        """Copy what ``told``, the finished job ``job``, publishes to its folder on this machine; return the names of
        the files, none if nothing is published. JobError if they do not arrive complete.

        ``has_failed``: the job may have ended before it made its folder on the head; then nothing is published."""
        assert told.out is not None
        names, mark = _PUBLIC[told.command], secrets.token_hex(8)
        listed = f"$(ls -d {shlex.join(names)} 2>/dev/null)"
        unless = f"test -d {shlex.quote(told.out)} || {{ echo {mark}:; exit; }}; " if has_failed else ""
        # Each line is marked and written at once (so shorter than a page), because Ray writes to the same log.
        packer = self._submitted(
            entrypoint=f'{unless}cd {shlex.quote(told.out)} && echo {mark}: && test -n "{listed}" && '
            f"tar --create --gzip {listed} | base64 --wrap=2000 | sed -u 's/^/{mark}:/'",
            metadata={},
        )
        has_begun = False
        with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as archive:

            def keep(line: str) -> None:
                nonlocal has_begun
                if line.startswith(f"{mark}:"):
                    has_begun = True
                    packed.write(base64.b64decode(line.removeprefix(f"{mark}:"), validate=True))

            try:
                self.follow(packer, keep, at_end=True)
                if has_begun and not packed.tell():
                    return []
                packed.seek(0)
                with gzip.open(packed) as unzipped:  # to its end, where its checksum is
                    shutil.copyfileobj(unzipped, archive)
                archive.seek(0)
                return _unpacked(archive, names, Path(told.to), {"job": job, "address": self.address})
            except (ValueError, OSError, EOFError, zlib.error, tarfile.TarError) as error:
                if isinstance(error, UserError):
                    raise
                raise JobError(
                    f"{told.out}: what the job published did not arrive complete ({error}); {self.come_back(job)}."
                ) from error


def _unpacked(archive: IO[bytes], names: Sequence[str], to: Path, record: Mapping[str, str]) -> list[str]:
    """Unpack ``archive`` into ``to``, where it replaces what an earlier job left; return the names of its files."""
    require_place(to)
    make_folder(to)
    with (
        tempfile.TemporaryDirectory(prefix=".fetched-", dir=to) as temporary,
        tarfile.open(fileobj=archive, mode="r:") as opened,
    ):
        members = opened.getmembers()
        for each in members:
            parts = PurePosixPath(each.name).parts or ("",)
            if not (each.isfile() or each.isdir()) or parts[0] not in names or "private" in parts:
                raise ValueError(f"{each.name} is not to be fetched")
        opened.extractall(temporary, filter="data")
        write_atomically(to / _RECORD, lambda path: path.write_text(json.dumps(record, indent=2) + "\n"))
        for name in names:
            place, arrived = to / name, Path(temporary) / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
            if arrived.exists():
                arrived.rename(place)
    return sorted(each.name for each in members if each.isfile())
