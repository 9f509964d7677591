"""Reads off a compiled program what its devices exchange. Knows the text of XLA's programs, no model."""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(r"^ *(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_PARAMETER = re.compile(r"parameter\((\d+)\)")
_BYTES = {"pred": 1, "bf16": 2}


class Collective(NamedTuple):
    """One exchange."""

    kind: str  # of KINDS
    num_bytes: int  # of its result on one device
    is_of_state: bool  # what it exchanges is made of weights or KV cache alone


def find_collectives(hlo: str, state_parameters: AbstractSet[int]) -> list[Collective]:
    """Lists the exchanges of a program, each instruction once: what stands in a loop may run several times.

    Args:
      hlo: The optimised program.
      state_parameters: Numbers of the entry's parameters that are weights or KV cache.
    """
    return [
        Collective(kind, _num_bytes(shape, is_started), is_of_state)
        for shape, operation, is_of_state in _walk(hlo, state_parameters)
        for kind, is_started in [_kind(operation)]
        if kind in KINDS
    ]


def bytes_by_kind(collectives: list[Collective]) -> Mapping[str, tuple[int, int]]:
    """Returns how many there are of each kind, and their bytes."""
    found: dict[str, tuple[int, int]] = {}
    for each in collectives:
        count, num_bytes = found.get(each.kind, (0, 0))
        found[each.kind] = (count + 1, num_bytes + each.num_bytes)
    return found


def _walk(hlo: str, state_parameters: AbstractSet[int]) -> Iterator[tuple[str, str, bool]]:
    """Yields shape and operation of each instruction, and whether all that it reads in the entry is state."""
    entry = hlo.index("\nENTRY ")
    for text, is_entry in ((hlo[:entry], False), (hlo[entry:], True)):
        of_state: dict[str, bool] = {}
        for line in text.splitlines():
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            name, shape, operation, rest = match.groups()
            parameter = _PARAMETER.search(f"{operation}({rest}")
            reads = [of_state[other] for other in _NAME.findall(_operands(rest)) if other in of_state]
            if parameter:
                reads = [is_entry and int(parameter[1]) in state_parameters]
            if reads or not is_entry:  # a constant says nothing
                of_state[name] = bool(reads) and all(reads)
            yield shape, operation, of_state.get(name, False)


def _operands(rest: str) -> str:
    """Returns the text up to the parenthesis that closes the operands."""
    depth = 1
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:index]
    return rest


def _kind(operation: str) -> tuple[str, bool]:
    return operation.removesuffix("-start"), operation.endswith("-start")


def _num_bytes(shape: str, is_started: bool) -> int:
    """Returns the bytes of a result. One that is only started has its operand before its result, then scalars."""
    sizes = [_array_bytes(*array) for array in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape))]
    if is_started and len(sizes) > 1:
        return max(sizes)
    return sum(sizes)


def _array_bytes(dtype: str, dimensions: str) -> int:
    bits = re.search(r"\d+", dtype)
    size = _BYTES.get(dtype) or (int(bits[0]) // 8 if bits else 0) or 1
    for dimension in filter(None, dimensions.split(",")):
        size *= int(dimension)
    return size
