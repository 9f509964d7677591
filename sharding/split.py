"""How a dimension is dealt to shards when its length doesn't divide, or holds several things. Arithmetic of ints.

A dimension is a row of parts, each of units that stay whole: a fused projection is query heads, key heads and value
heads. Every shard gets its share of each part, so that slices of equal length are what the shards hold:

    gate and up of 3 columns each, 2 shards:   g0 g1 u0 u1 | g2 00 u2 00

Where units run out, zeros stand. -1 names them here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Part(Protocol):
    """Units of one kind, one after the other.

    Attributes:
      count: Units.
      width: Elements of each.
    """

    @property
    def count(self) -> int: ...

    @property
    def width(self) -> int: ...

    def units(self, num_shards: int) -> np.ndarray:
        """Returns [num_shards, n]: the units of each shard, -1 for zeros."""
        ...


@dataclass(frozen=True)
class Even:
    """Units that are dealt in order, as many to each shard."""

    count: int
    width: int = 1

    def units(self, num_shards: int) -> np.ndarray:
        per_shard = -(-self.count // num_shards)
        return _up_to(np.arange(num_shards * per_shard).reshape(num_shards, per_shard), self.count)


class UndividedError(ValueError):
    """What must stay together would be dealt to several shards."""


@dataclass(frozen=True)
class Groups:
    """What there is one of for `size` neighbours of a part, a scale say: it goes where they go.

    >>> Groups(Even(count=6, width=4), size=2).units(num_shards=4).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [-1, -1, -1, -1]]
    """

    part: Part
    size: int

    @property
    def count(self) -> int:
        return self.part.count * self.part.width // self.size

    @property
    def width(self) -> int:
        return 1

    def units(self, num_shards: int) -> np.ndarray:
        elements = element_order([self.part], num_shards).reshape(num_shards, -1)
        if elements.shape[1] % self.size:
            raise UndividedError(f"groups of {self.size} don't divide the {elements.shape[1]} that each device has")
        groups = elements.reshape(num_shards, -1, self.size)
        first = groups[..., :1]
        whole = np.where(first < 0, -1, first + np.arange(self.size))
        if (groups != whole).any() or (first[first >= 0] % self.size).any():
            raise UndividedError(f"groups of {self.size} would be cut between devices")
        return np.where(first < 0, -1, first // self.size)[..., 0]


@dataclass(frozen=True)
class HeadSplit:
    """Query heads, in groups that share a key-value head, over shards.

    Groups stay together, and shards have equal numbers of heads. Where there are more shards than key-value heads,
    each of those is held by several shards, which divide its group's query heads among them.

    >>> split = HeadSplit(num_heads=9, num_kv_heads=3, num_shards=2)
    >>> split.query_heads.tolist()
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, -1, -1, -1]]
    >>> split.kv_heads.tolist()
    [[0, 1], [2, -1]]
    >>> HeadSplit(num_heads=4, num_kv_heads=2, num_shards=4).kv_heads.tolist()
    [[0], [0], [1], [1]]
    """

    num_heads: int
    num_kv_heads: int
    num_shards: int

    @property
    def num_copies(self) -> int:
        """Shards that hold each key-value head."""
        if self.num_shards <= self.num_kv_heads:
            return 1
        # Zero heads make the number of key-value heads a divisor of the number of shards.
        divisors = (n for n in range(self.num_kv_heads, self.num_shards + 1) if self.num_shards % n == 0)
        return self.num_shards // next(divisors)

    @property
    def kv_heads_per_shard(self) -> int:
        return -(-self.num_kv_heads // self.num_shards)

    @property
    def heads_per_shard(self) -> int:
        return self.kv_heads_per_shard * self._share_of_group

    @property
    def query_heads(self) -> np.ndarray:
        """[num_shards, heads_per_shard], -1 for a zero head."""
        group = self.num_heads // self.num_kv_heads
        part = np.arange(self.num_shards) % self.num_copies
        within = _up_to(part[:, None] * self._share_of_group + np.arange(self._share_of_group), group)[:, None]
        kv_heads = self.kv_heads[:, :, None]
        heads = np.where((kv_heads < 0) | (within < 0), -1, kv_heads * group + within)
        return heads.reshape(self.num_shards, -1)

    @property
    def kv_heads(self) -> np.ndarray:
        """[num_shards, kv_heads_per_shard], -1 for a zero head."""
        first = np.arange(self.num_shards) // self.num_copies * self.kv_heads_per_shard
        return _up_to(first[:, None] + np.arange(self.kv_heads_per_shard), self.num_kv_heads)

    @property
    def _share_of_group(self) -> int:
        """Query heads that a shard has for each of its key-value heads."""
        return -(-(self.num_heads // self.num_kv_heads) // self.num_copies)


@dataclass(frozen=True)
class QueryHeads:
    """Query heads of `width` elements, dealt as HeadSplit says."""

    num_heads: int
    num_kv_heads: int
    width: int

    @property
    def count(self) -> int:
        return self.num_heads

    def units(self, num_shards: int) -> np.ndarray:
        return HeadSplit(self.num_heads, self.num_kv_heads, num_shards).query_heads


@dataclass(frozen=True)
class KVHeads:
    """Key or value heads of `width` elements, dealt as HeadSplit says."""

    num_heads: int
    num_kv_heads: int
    width: int

    @property
    def count(self) -> int:
        return self.num_kv_heads

    def units(self, num_shards: int) -> np.ndarray:
        return HeadSplit(self.num_heads, self.num_kv_heads, num_shards).kv_heads


def element_order(parts: Sequence[Part], num_shards: int) -> np.ndarray:
    """Returns what stands where along a dealt dimension, shard after shard: indices before dealing, -1 for zeros.

    >>> element_order([Even(3), Even(3)], num_shards=2).tolist()
    [0, 1, 3, 4, 2, -1, 5, -1]
    """
    columns, offset = [], 0
    for part in parts:
        units = part.units(num_shards)[:, :, None]  # [num_shards, n, 1]
        elements = np.where(units < 0, -1, offset + units * part.width + np.arange(part.width))
        columns.append(elements.reshape(num_shards, -1))
        offset += part.count * part.width
    return np.concatenate(columns, axis=1).ravel()


def _up_to(indices: np.ndarray, count: int) -> np.ndarray:
    return np.where(indices < count, indices, -1)
