"""The identity of a block: what parts two prefixes, and why a collision does no harm."""

import struct

from jaxllm.scheduler.block_hash import hash_block


def test_the_hashed_bytes_are_written_out() -> None:
    seen: list[bytes] = []

    def record(data: bytes) -> bytes:
        seen.append(data)
        return b"digest"

    first = hash_block(None, [1, -1], (("salt", "ab"),), record)
    hash_block(first, [3, 4], (), record)

    def number(value: int) -> bytes:
        return struct.pack("<q", value)

    assert seen[0] == b"".join(
        [
            number(6) + b"parent" + number(0),
            number(6) + b"tokens" + number(16) + number(1) + number(-1),
            number(8) + b"key:salt" + number(2) + b"ab",
        ]
    )
    assert seen[1] == b"".join(
        [
            number(6) + b"parent" + number(6) + b"digest",
            number(6) + b"tokens" + number(16) + number(3) + number(4),
        ]
    )


def test_equal_prefixes_are_equal() -> None:
    one = hash_block(hash_block(None, [1, 2]), [3, 4])
    other = hash_block(hash_block(None, [1, 2]), [3, 4])
    assert one.digest == other.digest and one.is_same_prefix(other)


def test_every_part_counts() -> None:
    prefixes = [
        hash_block(None, [3, 4]),
        hash_block(None, [4, 3]),
        hash_block(hash_block(None, [1, 2]), [3, 4]),
        hash_block(hash_block(None, [1, 5]), [3, 4]),
        hash_block(hash_block(None, [1, 2], (("salt", "a"),)), [3, 4]),
        hash_block(hash_block(None, [1, 2], (("salt", "b"),)), [3, 4]),
        hash_block(hash_block(None, [1, 2], (("adapter", "a"),)), [3, 4]),
    ]
    assert len({prefix.digest for prefix in prefixes}) == 7
    same = [(i, j) for i in range(7) for j in range(7) if prefixes[i].is_same_prefix(prefixes[j])]
    assert same == [(i, i) for i in range(7)]


def test_equal_digests_of_different_prefixes_are_told_apart() -> None:
    def constant(data: bytes) -> bytes:
        return b"x"

    left = hash_block(hash_block(None, [1], (), constant), [9], (), constant)
    right = hash_block(hash_block(None, [2], (), constant), [9], (), constant)
    assert left.digest == right.digest
    assert not left.is_same_prefix(right)


def test_a_long_chain_can_be_compared_and_forgotten() -> None:
    left = right = None
    for token_id in range(100_000):
        left, right = hash_block(left, [token_id]), hash_block(right, [token_id])
    assert left is not None and right is not None and left.is_same_prefix(right)
