import dataclasses

import pytest

from pallas_kernels.aot.bundles import Loop, Schedule
from pallas_kernels.aot.program import Trips, Work
from pallas_kernels.aot.roofline import (
    count_cycles,
    estimate,
    estimate_gpu,
    find_main_loop,
    find_trips,
    ideal_seconds,
)
from pallas_kernels.aot.targets import GPU_TARGETS, TPU_TARGETS

V6E, V5E, H100 = TPU_TARGETS["v6e"], TPU_TARGETS["v5e"], GPU_TARGETS["sm_90"]


def make_schedule(
    cycles: int, loops: tuple[Loop, ...], dmas_at: tuple[int, ...] = (), skips: tuple[range, ...] = ()
) -> Schedule:
    """Makes a program whose bundles all use the matrix unit."""
    return Schedule(
        name="k.1",
        capacity={"MXU": 2, "VALU": 4, "VLOAD:FILL": 3, "VSTORE:SPILL": 1},
        used=((1, 0, 0, 0),) * cycles,
        scalar_spills=(0,) * cycles,
        dmas=tuple(int(number in dmas_at) for number in range(cycles)),
        loops=loops,
        skips=skips,
    )


def test_cycles_of_a_loop_nest_by_hand() -> None:
    inner = Loop(first=20, last=69, inner=())
    schedule = make_schedule(100, (Loop(first=10, last=89, inner=(inner,)),))
    # 20 bundles outside, 30 of the outer loop 4 times, 50 of the inner one 32 times.
    assert count_cycles(schedule, Trips((4, 32))) == 20 + 4 * 30 + 32 * 50


def test_a_dissolved_outer_loop_leaves_the_inner_count() -> None:
    schedule = make_schedule(100, (Loop(first=10, last=89, inner=()),))
    assert count_cycles(schedule, Trips((1, 32))) == 20 + 32 * 80


def test_loops_beside_the_main_one_run_once_a_pass_and_copies_once_each() -> None:
    copies = Loop(first=12, last=21, inner=())
    clear = Loop(first=30, last=33, inner=())
    main = Loop(first=40, last=89, inner=())
    schedule = make_schedule(100, (Loop(first=10, last=94, inner=(copies, clear, main)),), dmas_at=(15,))
    outer_own = 85 - 10 - 4 - 50
    expected = 15 + 8 * (outer_own + 16 * 10 + 4) + 24 * 50
    assert count_cycles(schedule, Trips((8, 24), copies=16)) == expected


def test_the_main_loop_is_the_one_with_the_most_cycles_in_all() -> None:
    deep, tiny = Loop(first=40, last=44, inner=()), Loop(first=70, last=70, inner=())
    outer = Loop(first=10, last=94, inner=(deep, Loop(first=69, last=71, inner=(tiny,))))
    schedule = make_schedule(100, (outer,))
    # The outer loop's 77 bundles run 4 times, the inner one's 5 run 100 times; or only 8 times.
    assert find_main_loop(schedule, Trips((4, 100))) == ((outer, deep), (4, 100))
    with pytest.raises(ValueError, match=r"k.1's main loop is 1 deep, its trips are given as \(4, 8\)"):
        find_main_loop(schedule, Trips((4, 8)))


def test_loops_that_run_once_a_pass_may_be_dissolved() -> None:
    inner = Loop(first=20, last=89, inner=())
    outer = Loop(first=10, last=94, inner=(inner,))
    schedule = make_schedule(100, (outer,))
    assert find_main_loop(schedule, Trips((1, 6, 24, 24))).runs == (6, 24)
    assert find_main_loop(schedule, Trips((6, 6, 24, 24))).runs == (6, 24)
    assert find_main_loop(make_schedule(9, ()), Trips((1, 1))) == ((), ())


def test_versions_of_the_inner_loop_share_its_runs() -> None:
    masked, whole = Loop(first=22, last=49, inner=()), Loop(first=62, last=79, inner=())
    parts = Loop(first=10, last=89, inner=(masked, whole))
    schedule = make_schedule(100, (parts,), skips=(range(15, 18), range(20, 50), range(60, 80), range(5, 95)))
    schedule = dataclasses.replace(schedule, used=((),) * 20 + ((1, 0, 0, 0),) * 80)
    # 10 parts of 8 heads; 3 parts in 10 are masked. 20 bundles around the parts loop, 30 of its own outside of both
    # versions, and in them 2 bundles before each loop.
    by_hand = 20 + 10 * 30 + 3 * 2 + 3 * 8 * 28 + 7 * 2 + 7 * 8 * 18
    assert count_cycles(schedule, Trips((10, 80), arms=(0.3, 0.7))) == pytest.approx(by_hand)
    with pytest.raises(ValueError, match="k.1 has no 3 versions of its computation"):
        count_cycles(schedule, Trips((10, 80), arms=(0.3, 0.3, 0.4)))


def test_versions_within_the_main_loop_share_its_runs() -> None:
    parts = Loop(first=10, last=89, inner=())
    schedule = make_schedule(100, (parts,), skips=(range(20, 50), range(60, 80)))
    assert count_cycles(schedule, Trips((10, 10), arms=(0.3, 0.7))) == pytest.approx(20 + 10 * 30 + 3 * 30 + 7 * 20)


def test_decode_bound_by_memory_by_hand() -> None:
    # 64 sequences of 2,048 tokens, 4 KiB of keys and values a token: 512 MiB, 327.4 us at 1.64 TB/s.
    work = Work(needed_bytes=2**29, needed_flops=0, moved_bytes=2**29, first_bytes=8 * 2**20)
    times = estimate(350_000, work, V6E)
    assert times.compute_s == pytest.approx(350_000 / 1.7548e9, rel=1e-3)
    assert times.memory_s == pytest.approx(327.36e-6, rel=1e-4)
    assert times.total_s == pytest.approx(327.36e-6 + 5.115e-6, rel=1e-4)
    assert times.roofline_share == pytest.approx(64 / 65)


def test_prefill_bound_by_instructions_by_hand() -> None:
    # One product of [1024, 1024] matrices: 2.147 GFLOP, 10.9 us at 197 TFLOP/s; the program takes 20 us.
    work = Work(needed_bytes=3 * 2**21, needed_flops=2**31, moved_bytes=3 * 2**21)
    times = estimate(20e-6 * V5E.clock_hz, work, V5E)
    assert times.total_s == pytest.approx(20e-6)
    assert times.roofline_share == pytest.approx(2**31 / 197e12 / 20e-6)


def test_narrow_products_reach_a_part_of_the_matrix_rate() -> None:
    # 920 GFLOP in products of 128 columns: 1 ms at v6e's rate, 2 ms with half of its 256 columns.
    work = Work(needed_bytes=0, needed_flops=920e9, moved_bytes=0, product_width=128)
    times = estimate(4e-3 * V6E.clock_hz, work, V6E)
    assert (times.roofline_share, times.reachable_share) == pytest.approx((0.25, 0.5))
    on_v5e = estimate(1, work, V5E)
    assert on_v5e.reachable_share == on_v5e.roofline_share


def test_padding_that_is_moved_costs_but_is_not_needed() -> None:
    work = Work(needed_bytes=1e6, needed_flops=0, moved_bytes=2e6)
    assert estimate(0, work, V6E).roofline_share == pytest.approx(0.5)


def test_int8_products_count_at_their_rate_and_at_bf16s_without_an_int8_unit() -> None:
    work = Work(needed_bytes=0, needed_flops=0, moved_bytes=0, needed_int8_ops=1840e12)
    assert ideal_seconds(work, V6E) == pytest.approx(1)
    assert ideal_seconds(work, TPU_TARGETS["tpu7x"]) == pytest.approx(1840 / 1155)


def test_gpu_is_bound_by_issue_memory_or_products() -> None:
    work = Work(needed_bytes=3.35e6, needed_flops=0, moved_bytes=3.35e6)
    assert estimate_gpu(0, 1000, work, H100).total_s == pytest.approx(1e-6)
    # Four instructions a cycle on each of 132 multiprocessors at 1.83 GHz.
    assert estimate_gpu(4 * 132 * 1830 * 5, 1000, work, H100).total_s == pytest.approx(5e-6)
    assert estimate_gpu(4 * 1830 * 5, 1, work, H100).total_s == pytest.approx(5e-6)
    heavy = work._replace(needed_flops=989e6 * 7)
    assert estimate_gpu(0, 1000, heavy, H100) == (7e-6, 1e-6, 7e-6, 1.0, 1.0)


def test_clocks_follow_from_the_matrix_rates() -> None:
    clocks = {name: round(target.clock_hz / 1e9, 2) for name, target in TPU_TARGETS.items()}
    assert clocks == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}


def test_trips_are_found_under_the_compilers_name() -> None:
    trips = {"decode": Trips((1,)), "decode_all": Trips((2,))}
    assert find_trips("decode_all.12", trips).bodies == (2,)
    with pytest.raises(ValueError, match="no trip counts are given for other.1, only for decode, decode_all"):
        find_trips("other.1", trips)


def test_targets_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        V6E.name = "other"  # type: ignore[misc]
