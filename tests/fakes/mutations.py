"""Damages model files: bytes, JSON values, and the sizes that formats state. Each function is decided by its Random."""

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

_LIES = (0, 1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_DEEP = 5000
_GGUF_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class Raw(str):
    """A piece of JSON that json.dumps could not write."""


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 17, 2**31 - 1, 2**31, 2**63, 10**30, 0.0, -0.5, 1e-30, 1e300,
    Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw("1" * 5000), Raw("[" * _DEEP + "]" * _DEEP), Raw('{"a":' * _DEEP),
    "", "x", "\0", "\ud800", "../../../etc/passwd", "/etc/passwd", "a\nb", "LlamaForCausalLM", "F32", "x" * 70_000,
    [], [[]], [0], [-1], [1, 2, 3], [2**62, 2**62], [0, 0], ["x"], {}, {"a": 1}, {"": {}}, [None], list(range(2000)),
)  # fmt: skip


def damaged_bytes(data: bytes, rng: Random) -> tuple[str, bytes]:
    """Returns what was done and the result: bytes flipped, overwritten, put in, taken out, cut off or repeated."""
    kind = rng.choice(_BYTE_DAMAGES)
    # Most of what can be misread stands at the beginning.
    position = rng.randrange(max(1, len(data) if rng.random() < 0.4 else min(len(data), 1500)))
    return f"{kind.__name__} at {position}", kind(data, position, rng)


def damaged_json(text: bytes, rng: Random) -> tuple[str, bytes]:
    """Returns what was done and the result: one to three values of a JSON object replaced, removed or given twice."""
    value, names = json.loads(text), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(_places(value))
        names.append(f"{key!r:.40}")
        action = rng.random()
        if action < 0.75:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        elif action < 0.9:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice(("", "x", "__metadata__", "model", f"{key}"))] = holder[key]
            holder[f"{key}{rng.choice(('', '.', '0'))}"] = copy.deepcopy(rng.choice(_VALUES))
        else:
            holder.insert(key, holder[key])
        if not _places(value):
            break
    written = _dumps(value)
    if rng.random() < 0.05:
        written = '{"__metadata__": {}, ' + written[1:] if rng.random() < 0.5 else written[:-1] + ', "a": 1, "a": 2}'
    return f"changed {', '.join(names)}", written.encode("utf-8", "surrogatepass")


def damaged_gguf(data: bytes, rng: Random) -> tuple[str, bytes]:
    """Returns what was done and the result: a stated size that lies, or damaged bytes."""
    if rng.random() < 0.5:
        return damaged_bytes(data, rng)
    position, width = rng.choice(gguf_numbers(data))
    old = int.from_bytes(data[position : position + width], "little")
    near = rng.choice((old - 1, old + 1, 2 * old, old ^ (1 << rng.randrange(8 * width))))
    new = (near if rng.random() < 0.5 else rng.choice(_LIES)) % (1 << 8 * width)
    changed = data[:position] + new.to_bytes(width, "little") + data[position + width :]
    return f"number at {position}: {old} -> {new}", changed


def damaged_safetensors(data: bytes, rng: Random) -> tuple[str, bytes]:
    """Returns what was done and the result: the header changed, with its true length or a false one, or bytes."""
    choice = rng.random()
    if choice < 0.4:
        return damaged_bytes(data, rng)
    header_bytes = int.from_bytes(data[:8], "little")
    if choice < 0.5:
        lie = rng.choice((*_LIES, header_bytes - 1, header_bytes + 1, len(data) - 8, len(data)))
        return f"header of {lie} bytes", (lie % 2**64).to_bytes(8, "little") + data[8:]
    name, header = damaged_json(data[8 : 8 + header_bytes], rng)
    return name, len(header).to_bytes(8, "little") + header + data[8 + header_bytes :]


def gguf_numbers(data: bytes) -> list[tuple[int, int]]:
    """Returns (position, bytes) of each number in a whole GGUF file's head: counts, lengths, types, values, offsets."""
    found: list[tuple[int, int]] = []
    position = 0

    def number(width: int) -> int:
        nonlocal position
        found.append((position, width))
        position += width
        return int.from_bytes(data[position - width : position], "little")

    def string() -> None:
        nonlocal position
        length = number(8)
        position += length

    def value(kind: int) -> None:
        if kind == 8:
            string()
        elif kind == 9:
            element, length = number(4), number(8)
            for _ in range(length):
                value(element)
        else:
            number(_GGUF_WIDTHS[kind])

    position = 4
    number(4)
    num_tensors, num_keys = number(8), number(8)
    for _ in range(num_keys):
        string()
        value(number(4))
    for _ in range(num_tensors):
        string()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return found


def _flip(data: bytes, position: int, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[min(position, len(data) - 1)] ^= 1 << rng.randrange(8)
        position = rng.randrange(len(data))
    return bytes(changed)


def _overwrite(data: bytes, position: int, rng: Random) -> bytes:
    width = rng.choice((4, 8))
    return data[:position] + (rng.choice(_LIES) % (1 << 8 * width)).to_bytes(width, "little") + data[position + width :]


def _insert(data: bytes, position: int, rng: Random) -> bytes:
    return data[:position] + rng.choice((b"\0", b"\xff" * 4, b"\n", b"{", b'"', rng.randbytes(33))) + data[position:]


def _remove(data: bytes, position: int, rng: Random) -> bytes:
    return data[:position] + data[position + rng.choice((1, 4, 8, 64)) :]


def _cut_off(data: bytes, position: int, rng: Random) -> bytes:
    return data[:position]


def _repeat(data: bytes, position: int, rng: Random) -> bytes:
    end = position + rng.choice((8, 32, 200))
    return data[:end] + data[position:]


_BYTE_DAMAGES: tuple[Callable[[bytes, int, Random], bytes], ...] = (
    _flip, _flip, _flip, _overwrite, _overwrite, _insert, _remove, _cut_off, _repeat
)  # fmt: skip


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns (container, key) of every value inside `value`, the outer ones as often as the inner."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        inner = []
        for holder in level:
            keys = holder if isinstance(holder, dict) else range(min(len(holder), 40))
            places = [(holder, key) for key in keys]
            found += places
            inner += [holder[key] for holder, key in places if isinstance(holder[key], (dict, list))]
        level = inner
    return found


def _dumps(value: Any) -> str:
    """json.dumps, with Raw pieces as they are."""
    raws: dict[str, str] = {}

    def marked(item: Any) -> Any:
        if isinstance(item, Raw):
            raws[f'"@raw{len(raws)}@"'] = str(item)
            return f"@raw{len(raws) - 1}@"
        if isinstance(item, dict):
            return {key: marked(inner) for key, inner in item.items()}
        return [marked(inner) for inner in item] if isinstance(item, list) else item

    text = json.dumps(marked(value), ensure_ascii=False)
    for mark, raw in raws.items():
        text = text.replace(mark, raw)
    return text
