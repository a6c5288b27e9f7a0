"""Where a run keeps what it makes: a shared storage, and never a folder that is deleted with a job."""

import pytest
from small_runs import run

from fairpate.files import StorageError
from fairpate.methods.base import config_digest
from fairpate.releases.directory import RunDirectoryError
from fairpate.run.folder import create_run_directory

pytestmark = pytest.mark.usefixtures("light_runs")


def test_runs_share_the_teachers_of_a_storage(small_config, tmp_path):
    shared = f"storage={tmp_path / 'shared'}"
    first = run(small_config(tmp_path / "first", shared))
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").glob("*.safetensors")}
    assert times
    second = run(small_config(tmp_path / "second", shared))
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "shared").glob("*.safetensors")}
    assert not first.teachers.exists()
    assert first.votes.read_bytes() == second.votes.read_bytes()
    assert first.labels.read_bytes() == second.labels.read_bytes()


def test_a_storage_is_a_place_and_does_not_change_what_is_computed(small_config, tmp_path):
    digests = {config_digest(small_config(tmp_path, f"storage={place}")) for place in ("null", "/mnt/x", "s3://b/x")}
    assert len(digests) == 1


def test_a_storage_that_cannot_be_used_ends_the_run_before_anything_is_trained(small_config, tmp_path):
    (tmp_path / "file").touch()
    for place in ("nowhere://bucket/x", str(tmp_path / "file" / "teachers")):
        with pytest.raises(StorageError, match=f"storage: {place}: cannot be written and read"):
            run(small_config(tmp_path / "run", f"storage={place}"))
    assert not any((tmp_path / "run" / "private").iterdir())


def test_a_ledger_is_not_kept_where_a_job_of_ray_unpacked_its_files(small_config, tmp_path):
    job = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0" / "runs" / "x"
    with pytest.raises(RunDirectoryError, match="deletes after the job, with the ledger; give an absolute path"):
        create_run_directory(small_config(job))
    assert not job.exists()
