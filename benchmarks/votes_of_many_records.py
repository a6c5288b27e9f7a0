"""Ten million records that vote: time and memory, which does not grow with their number.

    OMP_NUM_THREADS=1 python benchmarks/votes_of_many_records.py [--records 1000000 10000000] [--prototypes 150 1000]

Records of 100 features lie in a file (4 GB for ten million) that is mapped, not read; a public pool of 10,000 gives the
prototypes. They vote part by part; a part's pages are given back before the next is touched, as the operating system
does when memory is short. Each number of records has a process of its own. Its memory is what it had before the vote,
and the peak's rise above that. The label is the sign of one feature.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scale import status_bytes

from fairpate.data.embedding import Prototypes
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
    prototypes = Prototypes.of(pool, count=num_prototypes, embedding="components", num_components=60, seed=0)
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
    options = parser.parse_args()
    table = Table("records", "prototypes", "seconds", "processor seconds", "records/s", "MiB before", "rise, MiB")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records"
        for count in options.records:
            write_records(path, count)
            for num_prototypes in options.prototypes:
                with multiprocessing.get_context("spawn").Pool(1) as process:
                    taken = process.apply(vote, (path, num_prototypes))
                table.add_row(*row(taken))
    Console(width=110).print(table)


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
