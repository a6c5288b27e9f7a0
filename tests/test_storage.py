"""Storage: whole or absent, for its owner only, and one place for all nodes, on disks and in an object store."""

import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, object_store

from fairpate.config import ConfigError
from fairpate.files import StorageError, exists, join, open_storage, read, write
from fairpate.methods.base import configured
from fairpate.types import UserError

LARGE = bytes(range(256)) * 2**16  # two parts of an upload


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with object_store() as running:
        yield running


@pytest.fixture(params=["path", "file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, store: ObjectStore) -> str:
    """The same folder as a path, as a URI of a file system, and in an object store."""
    uris = {"path": str(tmp_path / "a b"), "file": (tmp_path / "a b").as_uri(), "s3": store.uri("some/folder")}
    return uris[request.param]


@pytest.mark.parametrize("content", [b"", b"content", LARGE], ids=["empty", "small", "large"])
def test_what_was_in_paper_is_read(folder: str, content: bytes) -> None:
    location = join(folder, "object")
    assert not exists(location)
    with pytest.raises(FileNotFoundError):
        read(location)
    write(location, b"earlier")
    write(location, content)
    assert exists(location)
    assert read(location) == content


def test_a_location_inside_a_folder_keeps_the_options_of_its_uri() -> None:
    assert join("/a/b", "c") == join(Path("/a/b/"), "c") == "/a/b/c"
    assert join("/a/what?", "b?c") == "/a/what?/b?c"
    assert join("file:///a%20b/", "c") == "file:///a%20b/c"
    inside = join("s3://bucket/a?region=eu-central-1", "c")
    assert inside == "s3://bucket/a/c?region=eu-central-1"


def test_a_path_and_its_uri_are_one_place(tmp_path: Path) -> None:
    write(join(tmp_path.as_uri(), "object"), b"content")
    assert (tmp_path / "object").read_bytes() == read(tmp_path / "object") == b"content"


@pytest.mark.parametrize("as_uri", [False, True])
def test_folders_and_files_are_for_their_owner_only(tmp_path: Path, as_uri: bool) -> None:
    folder = tmp_path / "new"
    earlier = os.umask(0)
    try:
        write(join(folder.as_uri() if as_uri else folder, "object"), b"content")
    finally:
        os.umask(earlier)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "object").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["object"]


def test_an_upload_that_fails_leaves_the_object_as_it_was(store: ObjectStore) -> None:
    write(store.uri("object"), b"earlier")
    store.refused_part = 2
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        write(store.uri("object"), LARGE)
    assert store.objects == {"object": b"earlier"}
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        write(store.uri("another"), LARGE)
    assert not exists(store.uri("another"))


def test_a_storage_is_the_same_to_everybody_who_opens_it(folder: str) -> None:
    storage = open_storage(folder)
    assert open_storage(folder) == storage
    pickle.loads(pickle.dumps(storage)).require_here()  # noqa: S301
    assert storage.uri == folder


def test_a_folder_of_the_same_name_on_another_node_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    storage = open_storage(str(folder))
    folder.rename(tmp_path / "of the first node")
    with pytest.raises(StorageError, match=r"storage: .*: not the same place on every node .*; give a network file"):
        storage.require_here()
    open_storage(str(folder))
    with pytest.raises(StorageError, match="not the same place"):
        storage.require_here()


def test_a_place_that_cannot_be_used_is_named_with_its_remedy(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    read_only = store.uri("read-only")
    store.read_only = True
    for uri in ("nowhere://bucket/x", "s3:///no-bucket", str(tmp_path / "file" / "x"), read_only):
        with pytest.raises(StorageError, match="give an absolute path or a URI") as raised:
            open_storage(uri)
        assert str(raised.value).startswith(f"storage: {uri}: cannot be ")
        assert isinstance(raised.value, UserError)


def test_wrong_credentials_are_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = store.uri("folder")
    open_storage(uri)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
    with pytest.raises(StorageError, match="ACCESS_DENIED"):
        open_storage(uri)


@pytest.mark.parametrize("storage", ["teachers", "./teachers", "s3:/bucket/x", ""])
def test_a_place_that_depends_on_where_one_stands_is_refused(storage: str) -> None:
    with pytest.raises(ConfigError, match=r"storage: .*absolute path, or a URI"):
        configured({"storage": storage})


def test_a_password_is_not_kept_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match="no password in the URI"):
        configured({"storage": "s3://key:secret@bucket/x"})


@pytest.mark.parametrize("storage", [None, "/mnt/teachers", "file:///mnt/x", "s3://bucket/x", "gs://bucket/x"])
def test_places_that_every_node_reads_alike_are_taken(storage: str | None) -> None:
    assert configured({"storage": storage}).storage == storage
