"""SentencePiece's model file, a protobuf message: read as far as its rules, checked, and written from a vocabulary.

A .model file is data, but the library that reads it follows the offsets of its character map without looking, so the
map is checked here first. Doesn't know how a text becomes pieces: the library does.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces; GGUF's are the same
UNIGRAM, BPE = 1, 2  # kinds of models
SPACE = "▁"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # how a field's value is stored


class Rules(NamedTuple):
    """What a model says besides its pieces.

    Attributes:
      kind: How the best pieces are found; UNIGRAM or BPE, or one of two that nobody uses.
      adds_prefix: Whether a text gets a space before it.
      removes_spaces: Whether runs of spaces become one, and those at both ends none.
      has_bytes: Whether what no piece spells is spelt in byte pieces.
      charsmap: The compiled table of characters to replace; empty where there is none.
      unknown_text: What an unknown piece becomes in a text.
      bos_id, eos_id: The ids that begin and end a text; -1 for none.
    """

    kind: int = UNIGRAM
    adds_prefix: bool = True
    removes_spaces: bool = True
    has_bytes: bool = False
    charsmap: bytes = b""
    unknown_text: str = " \u2047 "
    bos_id: int = 1
    eos_id: int = 2


def read_rules(model: bytes) -> Rules:
    """Reads the rules of a serialized model. The defaults are the format's own.

    Raises:
      ValueError: It is damaged, or its character map leads out of itself.
    """
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(model):
        if number in (2, 3) and isinstance(value, bytes):
            (trainer if number == 2 else normalizer).update(_fields(value))
    default = Rules()
    charsmap, unknown_text = normalizer.get(2, b""), trainer.get(44, default.unknown_text.encode())
    if not isinstance(charsmap, bytes) or not isinstance(unknown_text, bytes):
        raise ValueError("the character map or the unknown piece's text is damaged")
    check_charsmap(charsmap)
    return Rules(
        kind=_integer(trainer, 3, default.kind),
        adds_prefix=bool(_integer(normalizer, 3, default.adds_prefix)),
        removes_spaces=bool(_integer(normalizer, 4, default.removes_spaces)),
        has_bytes=bool(_integer(trainer, 35, default.has_bytes)),
        charsmap=charsmap,
        unknown_text=unknown_text.decode("utf-8"),
        bos_id=_integer(trainer, 41, default.bos_id),
        eos_id=_integer(trainer, 42, default.eos_id),
    )


def without_prefix(model: bytes) -> bytes:
    """Returns the model that adds no space before a text: of a repeated field the last counts."""
    return model + _message(3, _varint_field(3, 0))


def write_model(pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], rules: Rules) -> bytes:
    """Serializes a vocabulary as the library reads it.

    Raises:
      ValueError: The character map leads out of itself.
    """
    check_charsmap(rules.charsmap)
    rows = [
        _message(1, b"\x0a" + _varint(len(text)) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind]))
        for text, score, kind in zip((piece.encode() for piece in pieces), scores, types, strict=True)
    ]
    trainer = _varint_field(3, rules.kind) + _varint_field(35, rules.has_bytes)
    normalizer = _varint_field(3, rules.adds_prefix) + _varint_field(4, rules.removes_spaces) + _varint_field(5, 1)
    normalizer += _message(2, rules.charsmap) if rules.charsmap else b""
    return b"".join(rows) + _message(2, trainer) + _message(3, normalizer)


def check_charsmap(charsmap: bytes) -> None:
    """Checks a compiled character map: its size, a trie of 32-bit units, then the texts that the leaves point into.

    Looking up a byte c, the library goes from unit i to unit i ^ offset(i) ^ c, wherever that is.

    Raises:
      ValueError: The trie leads out of itself, or to a text that isn't there.
    """
    if not charsmap:
        return
    num_bytes = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or num_bytes % 4 or not 4 <= num_bytes < len(charsmap) - 4:
        raise ValueError("the character map's trie is larger than the map")
    units = np.frombuffer(charsmap, "<u4", num_bytes // 4, 4)
    texts = charsmap[4 + num_bytes :]
    is_leaf = units >> 31 != 0
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    reached = (np.arange(len(units), dtype=np.uint32) ^ offsets) | 0xFF
    if np.any(reached[~is_leaf & (units != 0)] >= len(units)):
        raise ValueError("the character map's trie leads out of itself")
    if texts[-1] or np.any((units[is_leaf] & 0x7FFFFFFF) >= len(texts)):
        raise ValueError("the character map names a text that it lacks")


def _integer(fields: dict[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if isinstance(value, bytes):
        raise ValueError(f"field {number} must be a number")
    return value - (1 << 64) if value >> 63 else value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields (number, value) of a message's fields; numbers of fixed width, which we need none of, as bytes."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == _VARINT:
            number, position = _read_varint(message, position)
            yield tag >> 3, number
            continue
        if kind == _BYTES:
            length, position = _read_varint(message, position)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field is stored in the unknown way {kind}")
        if length > len(message) - position:
            raise ValueError(f"a field of {length} bytes leads out of its message")
        yield tag >> 3, message[position : position + length]
        position += length


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Returns the number at `position`, seven bits a byte, lowest first, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise ValueError("the file ends inside a number")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, position
    raise ValueError("a number has more than ten bytes")


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content
