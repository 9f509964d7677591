"""Reads the programs that libtpu's compiler dumps: loops, cycles, and what each execution unit does.

A TPU core runs one bundle of instructions a cycle, in the order that the compiler fixed, so a program's cycles can be
counted without a TPU. Two of the dumped files are enough: the packed bundles after register allocation, where each
branch names the bundle that it goes to, and the use of the execution units bundle by bundle. Both still show the empty
bundles, which the final program encodes as delays: they cost a cycle each and hold no instruction. Waiting for memory
isn't in the program; see roofline.py. Knows text files only.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# What libtpu is told to dump: LIBTPU_INIT_ARGS of the process that compiles.
DUMP_FLAGS = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|pre-delay_hlo-static.*"
)
_BUNDLES = "-packed-bundles-post-ra.txt"
_USE = "-pre-delay_hlo-static-per-bundle-utilization.txt"
_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +[A-Z]* *: *>* *\{")
_BRANCH = re.compile(r"sbr\.rel .*?target bundleno = (\d+)")
_FILE = re.compile(r"\d+-(.+)-\d+$")
# The bundles that a branch still runs before it is taken.
_BRANCH_DELAY = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of the program, as the range of its bundles."""

    first: int
    last: int  # inclusive, the branch's delay slots with it
    inner: tuple["Loop", ...]

    def walk(self) -> Iterator["Loop"]:
        """Yields this loop and those inside it, in program order."""
        yield self
        for loop in self.inner:
            yield from loop.walk()


class Use(NamedTuple):
    """What a stretch of bundles costs, inner loops left out."""

    cycles: int
    bundles: int  # those that hold an instruction
    mxu_busy: float  # share of the matrix units' issue slots that are used, 0 to 1
    vpu_busy: float  # share of the vector ALUs' issue slots that are used, 0 to 1
    vector_spills: int  # vector registers stored to or loaded from spill slots
    scalar_spills: int  # scalar registers likewise
    dmas: int  # copies started


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """One kernel's program."""

    name: str  # of the HLO instruction
    capacity: dict[str, int]  # issue slots a bundle, by execution unit
    used: tuple[tuple[int, ...], ...]  # [bundle][unit], in the order of capacity
    scalar_spills: tuple[int, ...]  # by bundle
    dmas: tuple[int, ...]  # by bundle
    loops: tuple[Loop, ...]  # the outermost ones
    skips: tuple[range, ...] = ()  # bundles that a branch forward jumps over

    @property
    def cycles(self) -> int:
        """Bundles of the whole program, each counted once."""
        return len(self.used)

    def paths(self) -> list[tuple[Loop, ...]]:
        """Each loop with those around it, outermost first."""
        return list(_paths(self.loops))

    def use(self, loop: Loop | None) -> Use:
        """Counts a loop's own bundles, or with None those outside of every loop."""
        first, last, inner = (0, self.cycles - 1, self.loops) if loop is None else (loop.first, loop.last, loop.inner)
        own = sorted(set(range(first, last + 1)).difference(*(range(i.first, i.last + 1) for i in inner)))
        return Use(
            cycles=len(own),
            bundles=sum(1 for i in own if not self._is_empty(i)),
            mxu_busy=self._busy("MXU", own),
            vpu_busy=self._busy("VALU", own),
            vector_spills=self._total("VLOAD:FILL", own) + self._total("VSTORE:SPILL", own),
            scalar_spills=sum(self.scalar_spills[i] for i in own),
            dmas=sum(self.dmas[i] for i in own),
        )

    def arms(self, loop: Loop) -> list[range]:
        """Finds the stretches inside a loop that use the matrix units and may be jumped over, in program order.

        Of stretches within each other the outermost ones.
        """
        found: list[range] = []
        for skip in sorted(self.skips, key=lambda skip: (skip.start, -skip.stop)):
            is_inside = loop.first < skip.start and skip.stop <= loop.last and self._total("MXU", skip) > 0
            if is_inside and not any(skip.start < other.stop for other in found):
                found.append(skip)
        return found

    def _is_empty(self, bundle: int) -> bool:
        return self.used[bundle] == ()

    def _column(self, unit: str) -> int:
        return list(self.capacity).index(unit)

    def _total(self, unit: str, bundles: Sequence[int]) -> int:
        column = self._column(unit)
        return sum(self.used[i][column] for i in bundles if self.used[i])

    def _busy(self, unit: str, bundles: Sequence[int]) -> float:
        return self._total(unit, bundles) / (self.capacity[unit] * len(bundles)) if bundles else 0.0


def read_dumps(folder: Path) -> list[Schedule]:
    """Reads every program that was dumped into a folder, in the order of their compilation."""
    return [
        read_schedule(path, _use_file(path))
        for path in sorted(folder.glob(f"*{_BUNDLES}"))
        if "schedule-analysis" not in path.name
    ]


def read_schedule(bundles_file: Path, use_file: Path) -> Schedule:
    """Reads one program.

    Args:
      bundles_file: The "packed-bundles-post-ra" dump.
      use_file: The "pre-delay_hlo-static-per-bundle-utilization" dump of the same program.

    Raises:
      ValueError: if the two don't fit each other: another libtpu may write them differently.
    """
    text = bundles_file.read_text()
    bundles = _split_bundles(text)
    capacity, use = _read_use(use_file.read_text())
    if len(bundles) != len(use):
        raise ValueError(f"{bundles_file.name} has {len(bundles)} bundles, {use_file.name} has {len(use)}")
    return Schedule(
        name=_FILE.sub(r"\1", bundles_file.name.removesuffix(_BUNDLES)),
        capacity=capacity,
        used=tuple(row if _has_instruction(bundle) else () for bundle, row in zip(bundles, use, strict=True)),
        scalar_spills=tuple(len(re.findall(r"smem:\[#allocation\d+_spill\]", bundle)) for bundle in bundles),
        dmas=tuple(len(re.findall(r"= dma\.(?!done)", bundle)) for bundle in bundles),
        loops=_find_loops(bundles),
        skips=_find_skips(bundles),
    )


def _use_file(bundles_file: Path) -> Path:
    """The other dump of the same program: NUMBER-NAME-PASS-..., where PASS counts up."""
    prefix = re.sub(r"\d+$", "", bundles_file.name.removesuffix(_BUNDLES))
    (found,) = bundles_file.parent.glob(f"{prefix.replace('[', '[[]')}*{_USE}")
    return found


def _split_bundles(text: str) -> list[str]:
    """Cuts the text into bundles; a bundle may go on over several lines where it holds a message."""
    bundles: list[str] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match and int(match[1], 16) == len(bundles):
            bundles.append(line)
        elif bundles:
            bundles[-1] += "\n" + line
    return bundles


def _has_instruction(bundle: str) -> bool:
    return not re.match(r"[^{]*\{ *\}", bundle)


def _read_use(text: str) -> tuple[dict[str, int], list[tuple[int, ...]]]:
    _, units, capacity, _, *rows = text.splitlines()
    names = [name.strip() for name in units.split(",")]
    numbers = dict(zip(names, map(int, capacity.split()), strict=True))
    return numbers, [tuple(map(int, row.split())) for row in rows if row.strip()]


def _find_skips(bundles: Sequence[str]) -> tuple[range, ...]:
    return tuple(
        range(number + _BRANCH_DELAY + 1, int(target))
        for number, bundle in enumerate(bundles)
        for target in re.findall(_BRANCH, bundle)
        if int(target) > number + _BRANCH_DELAY + 1
    )


def _find_loops(bundles: Sequence[str]) -> tuple[Loop, ...]:
    """Every branch backwards closes a loop; loops that begin at the same bundle are one."""
    ends: dict[int, int] = {}
    for number, bundle in enumerate(bundles):
        for target in re.findall(_BRANCH, bundle):
            if int(target) <= number:
                last = min(number + _BRANCH_DELAY, len(bundles) - 1)
                ends[int(target)] = max(last, ends.get(int(target), 0))
    return _nest(sorted(ends.items(), key=lambda span: (span[0], -span[1])))


def _nest(spans: Sequence[tuple[int, int]]) -> tuple[Loop, ...]:
    loops = []
    while spans:
        (first, last), *rest = spans
        inside = [span for span in rest if span[0] <= last]
        loops.append(Loop(first=first, last=max([last, *(s[1] for s in inside)]), inner=_nest(inside)))
        spans = rest[len(inside) :]
    return tuple(loops)


def _paths(loops: Sequence[Loop]) -> Iterator[tuple[Loop, ...]]:
    for loop in loops:
        yield (loop,)
        for path in _paths(loop.inner):
            yield (loop, *path)
