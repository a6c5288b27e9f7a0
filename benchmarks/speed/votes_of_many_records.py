"""Ten million records that vote: time and memory, which does not grow with their number.

    OMP_NUM_THREADS=1 python benchmarks/speed/votes_of_many_records.py [--records 1000000 10000000]
        [--prototypes 150 1000] [--residual public private] [--persons]

Records of 100 features lie in a file (4 GB for ten million) that is mapped, not read; a public pool of 10,000 gives the
prototypes. They vote part by part; a part's pages are given back before the next is touched, as the operating system
does when memory is short. Each number of records has a process of its own. Its memory is what it had before the vote,
and the peak's rise above that. The label is the sign of one feature.

With ``--residual``: all releases of residual votes under either curvature instead, with ten records a person where
``--persons`` is given. Memory is then counted without pages of mapped files, which go when memory runs short: the
records' file, and that of their votes.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reading_tables import Peak, memory
from rich.console import Console
from rich.table import Table
from scale import status_bytes
from torch import nn

from fairpate.config import PrivacyTarget
from fairpate.data import Dataset
from fairpate.data.dataset import Split
from fairpate.data.embedding import Prototypes, SpaceConfig
from fairpate.data.large_arrays import Names
from fairpate.methods.base import Training
from fairpate.methods.residual_votes import ResidualVotes
from fairpate.releases.directory import RunDirectory
from fairpate.terminal import Reporter
from fairpate.types import IntArray

NUM_FEATURES, NUM_PUBLIC, NUM_CLASSES = 100, 10_000, 2
_PART = 2**16
_BYTES_PER_RECORD = 4 * NUM_FEATURES


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one vote took; memory in bytes."""

    num_records: int
    num_prototypes: int
    seconds: float
    processor_seconds: float
    before: float
    rise: float


def write_records(path: Path, count: int) -> None:
    """``count`` rows of ``NUM_FEATURES`` standard normal float32, written by the part."""
    rng = np.random.default_rng(0)
    with path.open("wb") as stream:
        for start in range(0, count, _PART):
            rng.standard_normal((min(_PART, count - start), NUM_FEATURES), dtype=np.float32).tofile(stream)


def vote(path: Path, num_prototypes: int) -> Taken:
    """All records in the file vote, in this process."""
    pool = torch.from_numpy(np.random.default_rng(1).standard_normal((NUM_PUBLIC, NUM_FEATURES), dtype=np.float32))
    prototypes = Prototypes.of(pool, SpaceConfig(), count=num_prototypes, seed=0)
    prototypes.nearest(pool[:1])  # libraries allocate their buffers at the first call
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started, processor = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE) as records:
        count_votes(prototypes, records)
    return Taken(
        num_records=path.stat().st_size // _BYTES_PER_RECORD,
        num_prototypes=num_prototypes,
        seconds=time.perf_counter() - started,
        processor_seconds=time.process_time() - processor,
        before=before,
        rise=status_bytes("VmHWM") - before,
    )


def count_votes(prototypes: Prototypes, records: mmap.mmap) -> IntArray:
    """The table without noise."""
    table_KC = np.zeros((len(prototypes.centres), NUM_CLASSES), dtype=np.int64)
    for start in range(0, len(records), _PART * _BYTES_PER_RECORD):
        part = np.frombuffer(records, dtype=np.float32, count=-1, offset=start)[: _PART * NUM_FEATURES]
        x = torch.from_numpy(part.reshape(-1, NUM_FEATURES))
        np.add.at(table_KC, (prototypes.nearest(x), (x[:, 0] > 0).long().numpy()), 1)
        del part, x
        records.madvise(mmap.MADV_DONTNEED)
    return table_KC


def main() -> None:
    """Print one row per number of records and prototypes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--prototypes", type=int, nargs="+", default=[150, 1000])
    parser.add_argument("--residual", choices=("public", "private"), nargs="*", default=[])
    parser.add_argument("--persons", action="store_true")
    options = parser.parse_args()
    kind = "numbers" if options.residual else "prototypes"
    table = Table("records", kind, "seconds", "processor seconds", "records/s", "MiB before", "rise, MiB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        for count in options.records:
            write_records(path, count)
            work: list[tuple[Callable[..., Taken], tuple[Any, ...]]]
            work = [(vote, (path, number)) for number in options.prototypes]
            if options.residual:
                num_persons = count // 10 if options.persons else 0
                work = [(releases, (path, curvature, num_persons)) for curvature in options.residual]
            for function, arguments in work:
                with multiprocessing.get_context("spawn").Pool(1) as process:
                    table.add_row(*row(process.apply(function, arguments)))
    Console(width=110).print(table)


def releases(path: Path, curvature: str, num_persons: int) -> Taken:
    """Sums, moments and residuals of all records in the file, in this process."""
    records = np.memmap(path, dtype=np.float32, mode="c").reshape(-1, NUM_FEATURES)
    num_records = len(records)
    pool = torch.from_numpy(np.random.default_rng(1).standard_normal((NUM_PUBLIC, NUM_FEATURES), dtype=np.float32))
    persons = [str(number % num_persons) for number in range(num_records)] if num_persons else ()
    private, public = (
        Split(
            x=x,
            y=(x[:, 0] > 0).long(),
            z=torch.zeros(len(x), dtype=torch.int64),
            record_id=Names(map(str, range(len(x)))),
            person_id=named,
        )
        for x, named in ((torch.from_numpy(records), persons), (pool, ()))
    )
    dataset = Dataset(
        name="records",
        kind="tabular",
        private=private,
        public=public,
        validation=public,
        test=public,
        label_names=("negative", "positive"),
        group_names=("all",),
        sensitive_attribute="group",
    )
    del persons
    settings = {"curvature": curvature, "embedding": {"num_components": 60}}
    method = ResidualVotes(target=PrivacyTarget(epsilon=1.0), residual_votes=settings)
    run, reporter = RunDirectory(root=path.parent), Reporter(quiet=True)
    training = Training(dataset=dataset, model=nn.Identity(), run=run, reporter=reporter, seed=0)
    method.multiplier()  # its tables are kept
    before, peak, started, processor = memory(), Peak(), time.perf_counter(), time.process_time()
    peak.start()
    found = method.measure(training)
    return Taken(
        num_records=num_records,
        num_prototypes=found.arrays["sums_CW"].shape[1],
        seconds=time.perf_counter() - started,
        processor_seconds=time.process_time() - processor,
        before=before,
        rise=peak.stop() - before,
    )


def row(taken: Taken) -> list[str]:
    """The cells of one line of the table."""
    memory = [f"{amount / 2**20:.0f}" for amount in (taken.before, taken.rise)]
    seconds = [f"{taken.seconds:.1f}", f"{taken.processor_seconds:.1f}"]
    return [
        f"{taken.num_records:,}",
        f"{taken.num_prototypes:,}",
        *seconds,
        f"{taken.num_records / taken.seconds:,.0f}",
        *memory,
    ]


if __name__ == "__main__":
    main()
