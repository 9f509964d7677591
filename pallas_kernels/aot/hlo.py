"""What XLA does around the kernels, read off a program's optimised HLO: copies, layout changes, lists of work.

Lists of work follow from the batch alone, so that a model with many layers makes them once a step: XLA sees that each
layer wants the same. They are told apart by the arguments that an instruction depends on.
"""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(\S+) = (.*)")
_PARAMETER = re.compile(r"\bparameter\((\d+)\)")
_NAME = re.compile(r"%([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 1 << 53  # what XLA can't estimate has a number near the largest of 64 bits
_KERNEL_CALL = re.compile(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"[^\n]*')


class OtherCycles(NamedTuple):
    """Cycles of XLA's own instructions, as XLA estimates them."""

    layer: int  # of what depends on a layer's arrays
    step: int  # of what doesn't: once a step


def find_kernel_calls(hlo: str) -> dict[str, str]:
    """Returns the calls of Pallas kernels by their names."""
    return {match[1]: match[0] for match in _KERNEL_CALL.finditer(hlo)}


def count_other_cycles(hlo: str, step_parameters: AbstractSet[int]) -> OtherCycles:
    """Adds up XLA's own instructions.

    Args:
      hlo: The optimised program.
      step_parameters: Numbers of the parameters that are the same in every layer.
    """
    entry = hlo[hlo.index("\nENTRY ") :]
    of_layer: set[str] = set()
    layer = step = 0
    for name, text in _instructions(entry):
        parameter = _PARAMETER.search(text)
        reads = of_layer.intersection(_NAME.findall(text.split("control-predecessors=")[0]))
        if reads or (parameter and int(parameter[1]) not in step_parameters):
            of_layer.add(name)
            layer += _cycles(text)
        else:
            step += _cycles(text)
    return OtherCycles(layer + sum(_cycles(text) for _, text in _instructions(hlo[: hlo.index("\nENTRY ")])), step)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            yield match[1], match[2]


def _cycles(text: str) -> int:
    return sum(cycles for cycles in map(int, _CYCLES.findall(text)) if cycles < _UNKNOWN_CYCLES)
