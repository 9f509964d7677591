"""How long a compiled kernel takes, from its program and the chip's numbers alone.

A TPU kernel computes on one tile while the next one arrives, so it takes as long as the slower of the two, and the
first tile's time before it can begin. Cycles come from the program: each loop's own bundles times how often the loop
runs. Both arms of a branch count where nothing is known of it, so the estimate errs on the slow side. Latencies of
single copies aren't known here.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pallas_kernels.aot.bundles import Loop, Schedule
from pallas_kernels.aot.program import Trips, Work
from pallas_kernels.aot.targets import GpuTarget, TpuTarget


class Estimate(NamedTuple):
    """Times of one call, in seconds."""

    compute_s: float  # of the instructions
    memory_s: float  # of the bytes moved
    total_s: float  # both, overlapped
    roofline_share: float  # of the chip's bandwidth or matrix rate, whichever binds a perfect kernel; 0 to 1
    reachable_share: float  # the same with the matrix rate that products of this width can have

    def figures(self) -> dict[str, Any]:
        """The same for the table, in microseconds."""
        return {
            "compute_us": round(self.compute_s * 1e6, 2),
            "memory_us": round(self.memory_s * 1e6, 2),
            "estimated_us": round(self.total_s * 1e6, 2),
            "roofline_share": round(self.roofline_share, 3),
            "reachable_share": round(self.reachable_share, 3),
        }


class MainLoop(NamedTuple):
    """The loop that a kernel spends its time in."""

    path: tuple[Loop, ...]  # it and those around it, outermost first; empty if the program has no loop
    runs: tuple[float, ...]  # how often each of their bodies runs


def find_main_loop(schedule: Schedule, trips: Trips) -> MainLoop:
    """Finds the loop with the most matrix products, or without any the most cycles, in all by a kernel's trip counts.

    Loops that run once a pass may be missing in the program: the compiler dissolves them.

    Raises:
      ValueError: the loops around the main loop aren't those that the counts are given for.
    """

    once = [index for index, runs in enumerate(trips.bodies) if runs == (trips.bodies[index - 1] if index else 1)]

    def weight(path: tuple[Loop, ...]) -> tuple[float, float, int, int]:
        """At most as many loops are missing as may be."""
        use = schedule.use(path[-1])
        runs = trips.bodies[min(len(path) + len(once), len(trips.bodies)) - 1]
        return runs * use.cycles * use.mxu_busy, runs * use.cycles, len(path), use.cycles

    paths = [path for path in schedule.paths() if len(path) <= len(trips.bodies)]
    path = max(paths, key=weight, default=())
    num_missing = len(trips.bodies) - len(path)
    if num_missing > len(once):
        raise ValueError(f"{schedule.name}'s main loop is {len(path)} deep, its trips are given as {trips.bodies}")
    missing = once[len(once) - num_missing :]
    return MainLoop(path, tuple(runs for index, runs in enumerate(trips.bodies) if index not in missing))


def count_cycles(schedule: Schedule, trips: Trips) -> float:
    """Cycles of one call of a TPU kernel. A loop beside the main path runs once each time, unless it starts copies.

    Raises:
      ValueError: see find_main_loop; or there aren't as many versions of the computation as `trips` says.
    """
    main = find_main_loop(schedule, trips)
    runs_of = {(loop.first, loop.last): runs for loop, runs in zip(main.path, main.runs, strict=True)}
    arms = _find_arms(schedule, main, trips)
    runs = [1.0] * schedule.cycles  # of each bundle

    def visit(loop: Loop, outside: float, depth: int) -> None:
        use = schedule.use(loop)
        is_version = depth == len(main.path) and any(loop.first in arm for arm in arms)
        each_time = main.runs[-1] if is_version else outside * (trips.copies if use.dmas else 1)
        own = runs_of.get((loop.first, loop.last), each_time)
        runs[loop.first : loop.last + 1] = [own] * (loop.last + 1 - loop.first)
        for inner in loop.inner:
            visit(inner, own, depth + 1)

    for loop in schedule.loops:
        visit(loop, 1, 1)
    for arm, share in zip(arms, trips.arms, strict=True):
        for bundle in arm:
            runs[bundle] *= share
    return sum(runs)


def _find_arms(schedule: Schedule, main: MainLoop, trips: Trips) -> list[range]:
    """Finds the versions of the computation in the innermost loop that has as many as there should be."""
    if not trips.arms:
        return []
    for loop in reversed(main.path):
        arms = schedule.arms(loop)
        if len(arms) == len(trips.arms):
            return arms
    raise ValueError(f"{schedule.name} has no {len(trips.arms)} versions of its computation")


def estimate(cycles: float, work: Work, target: TpuTarget) -> Estimate:
    """Overlaps the cycles of a TPU program with the bytes that it moves."""
    compute_s = cycles / target.clock_hz
    memory_s = work.moved_bytes / target.hbm_bytes_per_s
    total_s = max(compute_s, memory_s) + work.first_bytes / target.hbm_bytes_per_s
    ideal_s, width = ideal_seconds(work, target), min(work.product_width or target.mxu_width, target.mxu_width)
    reachable_s = max(ideal_s, work.needed_flops / (target.bf16_flops * width / target.mxu_width))
    return Estimate(compute_s, memory_s, total_s, ideal_s / total_s, reachable_s / total_s)


def estimate_gpu(warp_instructions: float, num_programs: int, work: Work, target: GpuTarget) -> Estimate:
    """Overlaps the instructions of a GPU kernel with its bytes and matrix products.

    Each multiprocessor issues four instructions a cycle, one a scheduler, if enough warps are ready, and what several
    programs read comes from memory once. How well a GPU hides latencies no file tells, so this is a bound: real kernels
    take longer.
    """
    rate = 4 * target.clock_hz * min(num_programs, target.num_multiprocessors)
    matrix_s = work.needed_flops / target.bf16_flops + work.needed_int8_ops / target.int8_ops
    compute_s = max(warp_instructions / rate, matrix_s)
    memory_s = work.needed_bytes / target.hbm_bytes_per_s
    total_s = max(compute_s, memory_s)
    share = ideal_seconds(work, target) / total_s
    return Estimate(compute_s, memory_s, total_s, share, share)


def ideal_seconds(work: Work, target: TpuTarget | GpuTarget) -> float:
    """What a perfect kernel takes: bound by bandwidth in decode, by the matrix units in prefill.

    A chip without an int8 unit would convert and take its bf16 rate.
    """
    matrix_s = work.needed_flops / target.bf16_flops
    if work.needed_int8_ops:
        matrix_s += work.needed_int8_ops / (target.int8_ops or target.bf16_flops)
    return max(work.needed_bytes / target.hbm_bytes_per_s, matrix_s)


def find_trips(name: str, trips: Mapping[str, Trips]) -> Trips:
    """Finds a kernel's entry: the compiler appends a number to the name that the kernel was given.

    Raises:
      ValueError: if no entry fits.
    """
    for key, entry in trips.items():
        if name == key or name.startswith(f"{key}."):
            return entry
    raise ValueError(f"no trip counts are given for {name}, only for {', '.join(trips) or 'nothing'}")
