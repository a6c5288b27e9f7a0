"""How many teachers fit: on a memory made up, and on one that a CPU can measure."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "speed"))
import gpu

from fairpate.config import FitConfig, ModelConfig
from teachers import teacher
from teachers.teacher import CudaMemory, Shard, TeacherSpec, stack_that_fits, train_stacked
from tests.accelerator import NEEDS_GPU

CPU = torch.device("cpu")
SPEC = TeacherSpec(model=ModelConfig(hidden=(8,)), fit=FitConfig(epochs=3, batch_size=8), num_classes=3, seed=4)


class MadeUp:
    """``base + per_teacher * k`` bytes, more from ``bend`` teachers on; infinity beyond what is available."""

    def __init__(self, available_bytes: float, *, base: float, per_teacher: float, bend: int = 10**9):
        self.available_bytes = available_bytes
        self.peak_of = lambda k: base + per_teacher * (k if k < bend else 3 * k)
        self.tried: list[int] = []

    def step(self, count: int) -> None:
        self.tried.append(count)

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        compute()
        peak = self.peak_of(self.tried[-1])
        return peak if peak <= self.available_bytes else math.inf


class SavedForBackward:
    """What a step on a CPU keeps for its backward pass: a memory that grows with the stack."""

    def __init__(self, available_bytes: float):
        self.available_bytes = available_bytes
        self.peaks: list[int] = []

    def peak_bytes(self, compute: Callable[[], None]) -> float:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            compute()
        self.peaks.append(sum(saved))
        return sum(saved)


def test_as_many_as_the_line_says_are_tried_and_taken() -> None:
    memory = MadeUp(1000, base=100, per_teacher=50)
    assert stack_that_fits(memory.step, memory, 100) == 14  # 100 + 14 * 50 = 800
    assert memory.tried == [1, 1, 2, 14]
    assert stack_that_fits(memory.step, memory, 5) == 5


def test_a_bend_in_the_line_is_found_by_trying() -> None:
    memory = MadeUp(1000, base=100, per_teacher=50, bend=6)
    assert stack_that_fits(memory.step, memory, 100) == 3
    assert memory.tried == [1, 1, 2, 14, 7, 3]


def test_a_peak_just_above_the_limit_costs_few_teachers() -> None:
    """As of a device that reserves memory in large pieces: 51 teachers need a little more than the line said."""
    memory = MadeUp(1000, base=35, per_teacher=15)
    line = memory.peak_of
    memory.peak_of = lambda k: line(k) + (20 if k > 49 else 0)
    assert stack_that_fits(memory.step, memory, 100) == 49
    assert memory.tried == [1, 1, 2, 51, 49]


def test_the_smallest_stacks() -> None:
    alone = MadeUp(1000, base=100, per_teacher=400)
    assert stack_that_fits(alone.step, alone, 100) == 1
    only = MadeUp(1000, base=100, per_teacher=50)
    assert stack_that_fits(only.step, only, 1) == 1
    nothing = MadeUp(10 * 2**30, base=0, per_teacher=9 * 2**30)
    with pytest.raises(ValueError, match=r"needs 9 GiB .* 8 GiB .* raise ray\.num_gpus, or lower teachers\.fit\.batch"):
        stack_that_fits(nothing.step, nothing, 4)


@pytest.mark.parametrize("max_shard_size", [None, 40])
def test_how_many_fit_does_not_follow_private_sizes(max_shard_size: int | None) -> None:
    spec = replace(SPEC, max_shard_size=max_shard_size)
    peaks = []
    for sizes in [(20, 3, 33), (0, 0, 0), (40, 40, 1), (1, 2, 40)]:
        probe = SavedForBackward(1e12)
        train_stacked(_shards(sizes), spec, range(3), device=CPU, memory=probe)
        peaks.append(probe.peaks)
    assert peaks == [peaks[0]] * 4


def test_a_stack_of_real_steps_fits_and_trains_the_same_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = _shards((20, 3, 33, 8, 0, 17, 25))
    whole = train_stacked(shards, SPEC, range(7), device=CPU)
    widths: list[int] = []
    train = teacher._Stack.train

    def recorded(stack: Any, **rehearsal: bool) -> Any:
        widths.extend([] if rehearsal else [len(stack._generators)])
        return train(stack, **rehearsal)

    monkeypatch.setattr(teacher._Stack, "train", recorded)
    probe = SavedForBackward(1e12)
    train_stacked(shards, SPEC, range(7), device=CPU, memory=probe)
    first, one, two, all_seven = probe.peaks
    assert first == one < two < all_seven
    memory = SavedForBackward((one + 2.5 * (two - one)) / 0.8)
    parts = train_stacked(shards, SPEC, range(7), device=CPU, memory=memory)
    assert widths == [7, 3, 3, 1]
    for expected, found in zip(whole, parts, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0)


@NEEDS_GPU
@pytest.mark.parametrize("max_shard_size", [None, 80])
def test_on_a_gpu_stacks_stay_within_this_process_share_whatever_the_shards(
    monkeypatch: pytest.MonkeyPatch, max_shard_size: int | None
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(teacher, "stack_that_fits", lambda *args: fitting.append(stack_that_fits(*args)) or fitting[-1])
    spec = TeacherSpec(
        model=ModelConfig(name="cnn"),
        fit=FitConfig(epochs=2, batch_size=32),
        num_classes=2,
        seed=4,
        max_shard_size=max_shard_size,
    )
    share = 2**31 / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        fitting: list[int] = []
        for sizes in [(80,) * 120, (3,) * 119 + (80,)]:
            shards = [
                Shard(x=torch.zeros(n, 3, 64, 64, dtype=torch.uint8), y=torch.zeros(n, dtype=torch.int64))
                for n in sizes
            ]
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            train_stacked(shards, spec, range(120), device=device)
            assert torch.cuda.max_memory_reserved() <= 0.9 * CudaMemory(device).available_bytes
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 < fitting[0] < 120
    assert fitting == [fitting[0]] * 2


def _shards(sizes: tuple[int, ...]) -> list[Shard]:
    generator = torch.Generator().manual_seed(1)

    def features(size: int) -> Tensor:
        return torch.randn(size, 6, generator=generator, dtype=torch.float64)

    return [Shard(x=features(n), y=torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def test_what_measures_a_gpu_takes_at_most_eight_minutes_and_runs_on_a_processor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sum(gpu.LIMITS_S.values()) <= 480
    for name in gpu.LIMITS_S:
        for device in ("cpu", "cuda"):
            script, *words = gpu.command(name, device)[1:]
            if script != "-m":
                known = Path(script).read_text(encoding="utf-8")
                assert all(f'"{word}"' in known for word in words if word.startswith("--"))
    gpu.probe("cpu")
    peaks = [line.partition(":")[2].rpartition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert len(peaks) == 3
    assert peaks == [peaks[0]] * 3
    gpu.noise("cpu")
    assert capsys.readouterr().out.count("million a second") == 3
