"""The identity of a full block: its tokens and everything before them. Knows no physical block.

A digest only finds candidates. Whether two blocks really hold the same prefix is decided by comparing tokens,
so a collision of digests costs a lookup and never mixes two prefixes.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence

HashFunction = Callable[[bytes], bytes]
ExtraKeys = tuple[tuple[str, str], ...]  # (tag, value): ("salt", ...), ("adapter", ...)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class BlockHash:
    """One link of a chain: this block's tokens, and the link of the block before.

    Attributes:
      digest: Of the parent's digest, the tokens and the extra keys.
      parent: The block before, or None for the first block.
      token_ids: The tokens of this block.
      extra_keys: What else parts prefixes of equal tokens. Set on the first block; the others inherit it.
    """

    __slots__ = ("digest", "parent", "token_ids", "extra_keys")

    def __init__(
        self, digest: bytes, parent: "BlockHash | None", token_ids: tuple[int, ...], extra_keys: ExtraKeys
    ) -> None:
        self.digest = digest
        self.parent = parent
        self.token_ids = token_ids
        self.extra_keys = extra_keys

    def is_same_prefix(self, other: "BlockHash") -> bool:
        """Whether both chains spell the same tokens under the same keys, back to the first block."""
        mine: BlockHash | None = self
        theirs: BlockHash | None = other
        while mine is not theirs:  # chains usually join at once, because the pool hands out one object a prefix
            if mine is None or theirs is None:
                return False
            if mine.token_ids != theirs.token_ids or mine.extra_keys != theirs.extra_keys:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


def hash_block(
    parent: BlockHash | None,
    token_ids: Sequence[int],
    extra_keys: ExtraKeys = (),
    hash_function: HashFunction = sha256,
) -> BlockHash:
    """Returns the link for a full block of `token_ids` that follows `parent`.

    The hashed bytes are canonical: each field is its tag and value, both preceded by their length, so that no
    two different inputs give the same bytes.
    """
    fields = [
        _field("parent", b"" if parent is None else parent.digest),
        _field("tokens", array("q", token_ids).tobytes()),
    ]
    fields += [_field("key:" + tag, value.encode()) for tag, value in extra_keys]
    return BlockHash(hash_function(b"".join(fields)), parent, tuple(token_ids), extra_keys)


def _field(tag: str, value: bytes) -> bytes:
    name = tag.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(value)) + value
