"""Everything that is to be measured on a GPU, in one command of at most eight minutes.

    python benchmarks/speed/gpu.py [--out FOLDER] [--device cpu] [--only NAME ...]

One part after another, each in a process of its own, with a time limit; what a part printed is in ``FOLDER/NAME.txt``,
and a part that fails or takes too long does not stop the others:

* ``tests``: those that a machine without a GPU skips, of stacks, networks and DP-SGD;
* ``small``: the batched solve of 500 and 5,000 small teachers, its votes beside the processor's, teachers a second;
* ``probe``: the number of teachers that fit, measured three times in one process, with the memory that was measured;
* ``private``: one step of DP-SGD beside a plain one, and the share of the noise, drawn on the card;
* ``noise``: normals a second, drawn and transformed on the processor, transformed on the card, and drawn there too;
* ``stacks``: ResNet-18 in ``bfloat16``, one after another, and stacked in blocks of 4 and 20.

``--device cpu`` runs the same parts on tiny sizes, to see that they run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fairpate.config import FitConfig, ModelConfig
from fairpate.nn.private_fit import GaussianNoise, OsRandomness, normals_of
from teachers.teacher import CudaMemory, Shard, TeacherSpec, train_stacked

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMITS_S = {"tests": 100, "small": 50, "probe": 60, "private": 120, "noise": 30, "stacks": 110}
"""The longest time of each part; 470 s in all."""


def command(name: str, device: str) -> list[str]:
    """The command of a part; on a processor with as little work as it takes."""
    on_gpu = device == "cuda"
    own = [str(Path(__file__)), "--device", device, "--part", name]
    words = {
        "tests": ["-m", "pytest", "-q", "-n", "0", "-k", "gpu or cuda", "tests/nn", "tests/teachers", "tests/data"],
        "small": [str(HERE / "small_teachers.py"), "solve", "--device", device, "--turns", "3" if on_gpu else "1"],
        "private": [str(HERE / "private_training.py"), "--device", device, "--repeats", "5" if on_gpu else "1"],
        "stacks": [str(HERE / "packing.py"), "--device", device, "--models", "resnet18", "--precision", "bfloat16"],
    }
    words["tests"] += [] if on_gpu else ["--collect-only"]
    words["small"] += ["--teachers", *(["500", "5000"] if on_gpu else ["20"])]
    words["private"] += [] if on_gpu else ["--cases", "1"]
    words["stacks"] += ["--seconds", "1"] if on_gpu else ["--seconds", ".1", "--side", "16", "--records", "4"]
    return [sys.executable, *words.get(name, own)]


def probe(device: str) -> None:
    """Train stacks of small CNNs whose number the memory decides, and print what each probe measured and chose."""
    on_gpu = device == "cuda"
    spec = TeacherSpec(
        model=ModelConfig(name="cnn"),
        fit=FitConfig(epochs=1, batch_size=32 if on_gpu else 2),
        num_classes=2,
        seed=4,
        max_shard_size=80 if on_gpu else 2,
    )
    count, side = (120, 64) if on_gpu else (3, 16)
    shard = Shard(x=torch.zeros(2, 3, side, side, dtype=torch.uint8), y=torch.zeros(2, dtype=torch.int64))
    memory: Measured
    if on_gpu:
        share = 2**31 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
    for turn in range(1, 4):
        memory = Measured(device)
        start = time.perf_counter()
        train_stacked([shard] * count, spec, range(count), device=torch.device(device), memory=memory)
        peaks = ", ".join(f"{peak / 2**20:,.1f}" for peak in memory.peaks)
        seconds = time.perf_counter() - start
        print(f"probe {turn}: peaks of {peaks} MiB, limit {0.8 * memory.available_bytes / 2**20:,.1f}, {seconds:.1f} s")
        if on_gpu:
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            print(f"  left: {allocated / 2**20:,.1f} MiB of tensors, {reserved / 2**20:,.1f} reserved", flush=True)


class Measured(CudaMemory):
    """The memory of a device, with every peak that was asked for; on a processor, the sizes of saved tensors."""

    def __init__(self, device: str):
        self.peaks: list[float] = []
        self._is_gpu = device == "cuda"
        if self._is_gpu:
            super().__init__(torch.device(device))

    @property
    def available_bytes(self) -> float:
        return super().available_bytes if self._is_gpu else 2.0**30

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        if self._is_gpu:
            found = super().peak_bytes(compute)
        else:
            saved: list[int] = []

            def keep(values: torch.Tensor) -> torch.Tensor:
                saved.append(values.nbytes)
                return values

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
                compute()
            found = sum(saved)
        self.peaks.append(found)
        return found


def noise(device: str) -> None:
    """Print normals a second in each of three ways, for a ResNet-18's parameters."""
    size, place = (11_200_000, torch.device(device)) if device == "cuda" else (10_000, torch.device("cpu"))
    randomness, processor = OsRandomness(), torch.device("cpu")
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "drawn and transformed on the processor": lambda: GaussianNoise(randomness).take(size).to(place),
        "drawn there, transformed on the device": lambda: normals_of(
            randomness.machine_words(size, processor).to(place)
        ),
        "drawn and transformed on the device": lambda: GaussianNoise(randomness).take(size, place),
    }
    for name, draw in ways.items():
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            mean = float(draw().mean())  # waits for the device
            seconds.append(time.perf_counter() - start)
        best_s = min(seconds[1:])
        print(f"{name}: {1e3 * best_s:.1f} ms, {size / best_s / 1e6:,.0f} million a second (mean {mean:.1e})")


def main() -> None:
    """Run the parts, print what each printed, and keep it in a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(LIMITS_S), default=list(LIMITS_S))
    parser.add_argument("--part", choices=("probe", "noise"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        {"probe": probe, "noise": noise}[options.part](options.device)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.only:
        start = time.perf_counter()
        with (options.out / f"{name}.txt").open("w+", encoding="utf-8") as written:
            try:
                code = subprocess.run(  # noqa: S603 our own commands
                    command(name, options.device),
                    cwd=ROOT,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    timeout=LIMITS_S[name],
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 124
            written.seek(0)
            print(f"== {name}: exit {code} after {time.perf_counter() - start:.0f} s\n{written.read()}", flush=True)
        failed += [name] * (code != 0)
    if failed:
        raise SystemExit(f"These parts did not finish: {', '.join(failed)}.")


if __name__ == "__main__":
    main()
