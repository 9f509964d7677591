"""Figures read off the machine code of one GPU kernel: registers, spills and what its inner loop issues.

Uses the disassemblers that come in triton's wheel; needs no GPU. Knows nothing of where the kernel came from.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^(\.L_\w+):")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_TARGET = re.compile(r"\(?(\.L_\w+)\)?")


class Loop(NamedTuple):
    """What one pass through a loop issues, in instructions of one warp."""

    instructions: int
    matrix: int  # products on the tensor cores, of whatever shape
    loads: int  # from global memory, those into shared memory included
    shared: int  # reads and writes of shared memory
    barriers: int
    exponentials: int
    spills: int  # loads and stores of registers that didn't fit


class Sass(NamedTuple):
    """One kernel's machine code in figures."""

    registers: int  # a thread
    spill_bytes: int  # of local memory a thread: spilled registers
    instructions: int
    loop: Loop | None  # the loop with the most matrix products; None if the kernel has no loop


class Line(NamedTuple):
    """One instruction."""

    opcode: str
    operands: str


def read_cubin(cubin: bytes) -> Sass:
    """Reads the figures of the one kernel in `cubin`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _run("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run("nvdisasm", "-c", file.name)
    found = _RESOURCES.search(resources)
    if not found:
        raise RuntimeError(f"cuobjdump printed no register count: {resources!r}")
    registers, stack, local = (int(group) for group in found.groups())
    lines, labels = parse(listing)
    return Sass(registers, stack + local, len(lines), count_main_loop(lines, labels))


def _run(tool: str, *arguments: str) -> str:
    import triton.backends.nvidia  # a development dependency; the kernels themselves don't need it

    path = Path(triton.backends.nvidia.__path__[0]) / "bin" / tool
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def parse(listing: str) -> tuple[list[Line], dict[str, int]]:
    """Returns the instructions, and for each label the index of the instruction that follows it."""
    lines: list[Line] = []
    labels = {}
    for text in listing.splitlines():
        if label := _LABEL.match(text):
            labels[label[1]] = len(lines)
        elif found := _INSTRUCTION.search(text):
            lines.append(Line(found[1], found[2]))
    return lines, labels


def count_main_loop(lines: list[Line], labels: dict[str, int]) -> Loop | None:
    """Counts the loop with the most matrix products, the shorter one of equals, the longest if there are none.

    What follows the last EXIT is out of line: a wait that goes on and then jumps back is no loop.
    """
    exits = [index for index, line in enumerate(lines) if line.opcode == "EXIT"]
    loops = []
    for index, line in enumerate(lines[: exits[-1] if exits else len(lines)]):
        target = _TARGET.search(line.operands) if line.opcode.startswith("BRA") else None
        start = labels.get(target[1], index + 1) if target else index + 1
        if start <= index:
            loops.append(_count(lines[start : index + 1]))
    if not loops:
        return None
    return max(loops, key=lambda loop: (loop.matrix, -loop.instructions if loop.matrix else loop.instructions))


def _count(lines: list[Line]) -> Loop:
    counts = Counter(line.opcode.split(".")[0] for line in lines)
    return Loop(
        instructions=len(lines),
        matrix=sum(count for opcode, count in counts.items() if opcode.endswith("MMA")),
        loads=counts["LDG"] + counts["LDGSTS"],
        shared=counts["LDS"] + counts["LDSM"] + counts["STS"] + counts["STSM"],
        barriers=counts["BAR"],
        exponentials=sum(line.opcode.startswith("MUFU.EX2") for line in lines),
        spills=counts["LDL"] + counts["STL"],
    )
