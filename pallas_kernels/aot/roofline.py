"""How long a compiled kernel takes, from its program and the chip's numbers alone.

A TPU kernel computes on one tile while the next one arrives, so it takes as long as the slower of the two, and one
tile more before it can begin. Cycles come from the program: each loop's own bundles times how often the loop runs.
Both arms of a branch count, so the estimate errs on the slow side. Latencies of single copies aren't known here.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pallas_kernels.aot.bundles import Loop, Schedule
from pallas_kernels.aot.program import Work
from pallas_kernels.aot.targets import GpuTarget, TpuTarget


class Estimate(NamedTuple):
    """Times of one call, in seconds."""

    compute_s: float  # the program's cycles
    memory_s: float  # the bytes that it moves
    total_s: float  # both, overlapped
    roofline_share: float  # of the chip's bandwidth or matrix rate, whichever binds a perfect kernel; 0 to 1


def count_cycles(schedule: Schedule, trips: tuple[float, ...]) -> float:
    """Cycles of one call of a kernel.

    Args:
      schedule: Its program.
      trips: How often the bodies of the main path's loops run, outermost first. See Program.

    Raises:
      ValueError: if the program has more loops around its main loop than `trips` knows.
    """
    path = schedule.main_path()
    if len(path) > len(trips):
        raise ValueError(f"{schedule.name} has {len(path)} nested loops, its trips are given for {len(trips)}")
    known = dict(zip(((loop.first, loop.last) for loop in path), trips[len(trips) - len(path) :], strict=True))
    cycles = float(schedule.use(None).cycles)
    return cycles + sum(_loop_cycles(schedule, loop, 1.0, known) for loop in schedule.loops)


def estimate(cycles: float, work: Work, target: TpuTarget) -> Estimate:
    """Overlaps the cycles of a TPU program with the bytes that it moves."""
    compute_s = cycles / target.clock_hz
    memory_s = work.moved_bytes / target.hbm_bytes_per_s
    total_s = max(compute_s, memory_s) + work.first_bytes / target.hbm_bytes_per_s
    return Estimate(compute_s, memory_s, total_s, ideal_seconds(work, target) / total_s)


def ideal_seconds(work: Work, target: TpuTarget | GpuTarget) -> float:
    """What a perfect kernel takes: bound by bandwidth in decode, by the matrix units in prefill."""
    return max(work.needed_bytes / target.hbm_bytes_per_s, work.needed_flops / target.bf16_flops)


def find_trips(name: str, trips: Mapping[str, tuple[float, ...]]) -> tuple[float, ...]:
    """Finds a kernel's entry: the compiler appends a number to the name that the kernel was given.

    Raises:
      ValueError: if no entry fits.
    """
    fits: Iterable[str] = (key for key in trips if name == key or name.startswith(f"{key}."))
    for key in fits:
        return trips[key]
    raise ValueError(f"no trip counts are given for {name}, only for {', '.join(trips) or 'nothing'}")


def _loop_cycles(schedule: Schedule, loop: Loop, outside: float, known: Mapping[tuple[int, int], float]) -> float:
    """Cycles of a loop and those in it; one that is off the main path is taken to run once each time."""
    runs = known.get((loop.first, loop.last), outside)
    own = runs * schedule.use(loop).cycles
    return own + sum(_loop_cycles(schedule, inner, runs, known) for inner in loop.inner)
