"""How one layer's KV cache lies in memory, for each backend. Everything outside the kernels treats it as opaque.

Split layout (every backend but tpu): two arrays (k, v), each [N, P, K, D].

TPU layout: one array [N, planes, P, 128]. A plane is the matrix of one head's keys or values in one block, a row a
token, just as the matrix unit wants it: a tile goes from HBM to the registers without being rearranged, and a whole
block is one contiguous copy. Heads follow one another, so that the plane axis can be split over devices:

    head_dim <= 64      one plane a head: keys in lanes 0 to 63, values in lanes 64 to 127
    else                the head's keys in ceil(D / 128) planes, then its values in as many; lanes past D are zero

Example: K = 2, D = 80 has planes k0 v0 k1 v1, each with 48 zero lanes; K = 1, D = 256 has k[:128] k[128:] v[:128]
v[128:].
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backends import BACKENDS

LANES = 128
_HALF = LANES // 2


def num_kv_heads_of(kv: tuple[jax.Array, ...], head_dim: int) -> int:
    """Returns K of a cache in either layout."""
    if len(kv) == 2:
        return kv[0].shape[2]
    return kv[0].shape[1] // planes_per_head(head_dim)


def planes_per_head(head_dim: int) -> int:
    """Returns how many planes of the TPU layout one KV head takes, keys and values together."""
    return 1 if head_dim <= _HALF else 2 * num_lane_tiles(head_dim)


def num_lane_tiles(head_dim: int) -> int:
    """Returns how many rows of 128 lanes one head's vector takes."""
    return -(-head_dim // LANES)


def piece_rows(block_size: int, dtype: jnp.dtype) -> int:
    """Returns the rows of a plane in one packed register: 8 of float32, 16 of bfloat16, 32 of a byte; P at most."""
    return min(block_size, 8 * 4 // dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """One layer's KV cache.

    Attributes:
      backend: Of the kernels that use it; see pallas_kernels.backends.
      block_size: P.
      num_kv_heads: K.
      head_dim: D.
      dtype: Of the stored keys and values.
    """

    backend: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one block in each array. The arrays have the block axis before it."""
        if self.backend == "tpu":
            return ((self.num_kv_heads * planes_per_head(self.head_dim), self.block_size, LANES),)
        return ((self.block_size, self.num_kv_heads, self.head_dim),) * 2

    @property
    def head_axis(self) -> int:
        """The axis of each array that may be split over devices: KV heads lie along it, whole."""
        return 1 if self.backend == "tpu" else 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, padding lanes included."""
        num_elements = sum(shape[0] * shape[1] * shape[2] for shape in self.block_shapes)
        return num_elements * self.dtype.itemsize

    def shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of each array of the cache."""
        return tuple((num_blocks, *shape) for shape in self.block_shapes)

    def pack(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Puts keys and values: [N, P, K, D] into this layout."""
        if self.backend != "tpu":
            return k, v
        return (pack_planes(k, v),)

    def unpack(self, kv: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Takes keys and values: [N, P, K, D] out of this layout."""
        if self.backend != "tpu":
            k, v = kv
            return k, v
        num_blocks = kv[0].shape[0]
        heads = kv[0].reshape(num_blocks, self.num_kv_heads, -1, self.block_size, LANES)
        rows = heads.transpose(0, 3, 1, 2, 4).reshape(num_blocks, self.block_size, self.num_kv_heads, -1)
        middle = rows.shape[-1] // 2
        return rows[..., : self.head_dim], rows[..., middle : middle + self.head_dim]


def pack_planes(k: jax.Array, v: jax.Array) -> jax.Array:
    """Puts rows of keys and values: [N, P, K, D] into planes: [N, planes, P, 128]."""
    num_blocks, block_size, num_kv_heads, head_dim = k.shape
    width = _HALF if head_dim <= _HALF else num_lane_tiles(head_dim) * LANES
    padding = ((0, 0), (0, 0), (0, 0), (0, width - head_dim))
    rows = jnp.concatenate([jnp.pad(k, padding), jnp.pad(v, padding)], axis=-1)
    tiles = rows.reshape(num_blocks, block_size, num_kv_heads, -1, LANES)
    return tiles.transpose(0, 2, 3, 1, 4).reshape(num_blocks, -1, block_size, LANES)
