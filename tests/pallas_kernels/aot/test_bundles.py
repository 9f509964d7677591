"""data/v6e holds libtpu's dump of a small kernel: a grid of 4 steps, in each a loop that copies a block and squares it.

`sum_squares`: grid=(4,), and inside `lax.fori_loop(0, 8, ...)` with one DMA of [128, 128] bf16, its wait, and one
`jnp.dot` into float32, compiled for v6e.
"""

from pathlib import Path

import pytest

from pallas_kernels.aot.bundles import Loop, read_dumps, read_schedule

DATA = Path(__file__).parent / "data"
BUNDLES = "1-k-01-packed-bundles-post-ra.txt"
USE = "1-k-02-pre-delay_hlo-static-per-bundle-utilization.txt"


def test_recorded_kernel_has_its_two_loops() -> None:
    (schedule,) = read_dumps(DATA / "v6e")
    assert schedule.name == "sum_squares.1"
    assert schedule.cycles == 293
    # The grid's branch at bundle 0x117 goes back to 0x3, the loop's at 0x108 to 0x14; four delay slots follow each.
    assert schedule.loops == (Loop(first=0x3, last=0x11B, inner=(Loop(first=0x14, last=0x10C, inner=()),)),)
    assert [[loop.first for loop in path] for path in schedule.paths()] == [[0x3], [0x3, 0x14]]


def test_recorded_kernel_waits_more_than_it_works() -> None:
    (schedule,) = read_dumps(DATA / "v6e")
    inner = schedule.use(schedule.loops[0].inner[0])
    assert (inner.cycles, inner.bundles, inner.dmas) == (249, 44, 1)
    assert (inner.vector_spills, inner.scalar_spills) == (0, 0)
    # Four products of the matrix unit, two of which fit into a bundle.
    assert inner.mxu_busy == pytest.approx(4 / (2 * 249))


def write_dump(folder: Path, bundles: list[str], use: list[str]) -> None:
    lines = [f"0x{number:x} : {bundle}" for number, bundle in enumerate(bundles)]
    (folder / BUNDLES).write_text("\n".join(["= control target key start", "", *lines]))
    head = ["== CAPACTIY:", "MXU, VALU, VLOAD:FILL, VSTORE:SPILL", "2 4 3 1", "== UTILIZATION:"]
    (folder / USE).write_text("\n".join([*head, *use]))


def test_spills_and_units_are_counted_in_their_loop_only(tmp_path: Path) -> None:
    bundles = [
        "{ %1 = sst [smem:[#allocation3_spill]] %s0 }",
        "> { %2 = vmatmul.bf16 %v1 ;; %s3 = sld [smem:[#allocation4_spill]] }",
        "> {}",
        "> { %4 = sbr.rel (%p1) target bundleno = 1 (0x1), region = 2 }",
        *["> {}"] * 4,
        "{ %5 = vst [vmem:[#allocation5_spill]] %v2 }",
    ]
    write_dump(tmp_path, bundles, ["0 0 0 0", "1 2 3 0", "0 0 0 0", "0 2 0 1", *["0 0 0 0"] * 4, "0 0 0 1"])
    (schedule,) = read_dumps(tmp_path)
    assert schedule.name == "k"
    assert schedule.loops == (Loop(first=1, last=7, inner=()),)
    inner, outside = schedule.use(schedule.loops[0]), schedule.use(None)
    assert (inner.cycles, inner.bundles, inner.vector_spills, inner.scalar_spills) == (7, 2, 4, 1)
    assert (inner.mxu_busy, inner.vpu_busy) == (1 / 14, 4 / 28)
    assert (outside.cycles, outside.vector_spills, outside.scalar_spills) == (2, 1, 1)


def test_loops_beside_each_other_stay_apart_and_messages_are_no_bundles(tmp_path: Path) -> None:
    branch = "{{ %1 = sbr.rel (%p1) target bundleno = {} (0x1) }}"
    halt = "{ %9 = shalt.err (!%p4) /* BoundsCheck 1\nhlo: k\n */ }"
    bundles = [halt, branch.format(0), *["{}"] * 4, branch.format(6), *["{}"] * 4, branch.format(0)]
    write_dump(tmp_path, bundles, ["0 0 0 0"] * 12)
    (schedule,) = read_dumps(tmp_path)
    # The last branch makes the first loop reach over everything; the one at 6 lies inside.
    assert schedule.loops == (Loop(first=0, last=11, inner=(Loop(first=6, last=10, inner=()),)),)
    assert schedule.use(schedule.loops[0]).bundles == 3


def test_stretches_that_may_be_jumped_over_are_found_with_their_matrix_products(tmp_path: Path) -> None:
    forward = "{{ %1 = sbr.rel (%p1) target bundleno = {} }}"
    # Bundles 5 and 6 are skipped by the branch at 0, bundle 12 by that at 7; four more always run after a branch.
    bundles = [forward.format(7), *["{ %2 = nop }"] * 6, forward.format(13), *["{ %2 = nop }"] * 5, "{ %3 = nop }"]
    bundles += ["{ %1 = sbr.rel (%p1) target bundleno = 0 }", *["{}"] * 4]
    use = ["1 0 0 0" if number in (6, 12) else "0 0 0 0" for number in range(len(bundles))]
    write_dump(tmp_path, bundles, use)
    (schedule,) = read_dumps(tmp_path)
    assert schedule.skips == (range(5, 7), range(12, 13))
    assert schedule.arms(schedule.loops[0]) == [range(5, 7), range(12, 13)]


def test_a_program_without_loops_is_counted_as_a_whole(tmp_path: Path) -> None:
    write_dump(tmp_path, ["{ %1 = vadd %v1 }"], ["0 1 0 0"])
    (schedule,) = read_dumps(tmp_path)
    assert schedule.paths() == []
    assert schedule.use(None).vpu_busy == 0.25


def test_files_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    write_dump(tmp_path, ["{ %1 = vadd %v1 }"], ["0 1 0 0", "0 0 0 0"])
    with pytest.raises(ValueError, match="has 1 bundles, .* has 2"):
        read_schedule(tmp_path / BUNDLES, tmp_path / USE)
