"""How one layer's KV cache lies in memory, for each backend. Everything outside the kernels treats it as opaque.

Split layout (triton, reference): two arrays (k, v), each [N, P, K, D].

XLA layout: keys [N, K, D, P] and values [N, K, P, D], each as its matrix product reads it: rows of P or D numbers go
from the blocks to the product's operand without being transposed. bfloat16 and float8_e4m3fn are held as unsigned
numbers of the same bits, since XLA:CPU widens a whole array of such floats to read or to write a part of it.

TPU layout: one array [N, planes, P, 128]. A plane is the matrix of one head's keys or values in one block, a row a
token, just as the matrix unit wants it: a tile goes from HBM to the registers without being rearranged, and a whole
block is one contiguous copy. Heads follow one another, so that the plane axis can be split over devices:

    head_dim <= 64      one plane a head: keys in lanes 0 to 63, values in lanes 64 to 127
    else                the head's keys in ceil(D / 128) planes, then its values in as many; lanes past D are zero

Example: K = 2, D = 80 has planes k0 v0 k1 v1, each with 48 zero lanes; K = 1, D = 256 has k[:128] k[128:] v[:128]
v[128:].

Where values are keys too, the split and the XLA layouts have the array of keys only.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backends import BACKENDS

LANES = 128
_HALF = LANES // 2
_BITS = {jnp.dtype(jnp.bfloat16): jnp.dtype(jnp.uint16), jnp.dtype(jnp.float8_e4m3fn): jnp.dtype(jnp.uint8)}
_TO_KEYS = (0, 2, 3, 1)  # [N, P, K, D] to [N, K, D, P]
_FROM_KEYS = (0, 3, 1, 2)
_TO_VALUES = (0, 2, 1, 3)  # [N, P, K, D] to [N, K, P, D], and back


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
      values_are_keys: Whether one vector a token and head serves as both.
    """

    backend: str
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    values_are_keys: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}")

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one block in each array. The arrays have the block axis before it."""
        block_size, num_heads, head_dim = self.block_size, self.num_kv_heads, self.head_dim
        if self.backend == "tpu":
            return ((num_heads * planes_per_head(head_dim), block_size, LANES),)
        if self.backend == "xla":
            shapes = ((num_heads, head_dim, block_size), (num_heads, block_size, head_dim))
        else:
            shapes = ((block_size, num_heads, head_dim),) * 2
        return shapes[:1] if self.values_are_keys else shapes

    @property
    def head_axis(self) -> int:
        """The axis of each array that may be split over devices: KV heads lie along it, whole."""
        return 1 if self.backend in ("tpu", "xla") else 2

    @property
    def array_dtype(self) -> jnp.dtype:
        """Of the arrays, whose bits are those of dtype."""
        return _BITS.get(self.dtype, self.dtype) if self.backend == "xla" else self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, padding lanes included."""
        num_elements = sum(shape[0] * shape[1] * shape[2] for shape in self.block_shapes)
        return num_elements * self.dtype.itemsize

    def shapes(self, num_blocks: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shape of each array of the cache."""
        return tuple((num_blocks, *shape) for shape in self.block_shapes)

    def zeros(self, num_blocks: int) -> tuple[jax.Array, ...]:
        """Returns an empty cache."""
        return tuple(jnp.zeros(shape, self.array_dtype) for shape in self.shapes(num_blocks))

    def pack(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        """Puts keys and values: [N, P, K, D] into this layout."""
        if self.backend == "tpu":
            return (pack_planes(k, v),)
        if self.backend == "xla":
            k, v = k.transpose(_TO_KEYS), v.transpose(_TO_VALUES)
        kv = tuple(as_bits(array, self.array_dtype) for array in (k, v))
        return kv[: len(self.block_shapes)]

    def unpack(self, kv: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """Takes keys and values: [N, P, K, D] out of this layout."""
        if self.backend == "tpu":
            return self._unpack_planes(kv[0])
        kv = tuple(as_bits(array, self.dtype) for array in kv)
        k = kv[0].transpose(_FROM_KEYS) if self.backend == "xla" else kv[0]
        if self.values_are_keys:
            return k, k
        return k, kv[1].transpose(_TO_VALUES) if self.backend == "xla" else kv[1]

    def _unpack_planes(self, planes: jax.Array) -> tuple[jax.Array, jax.Array]:
        num_blocks = planes.shape[0]
        heads = planes.reshape(num_blocks, self.num_kv_heads, -1, self.block_size, LANES)
        rows = heads.transpose(0, 3, 1, 2, 4).reshape(num_blocks, self.block_size, self.num_kv_heads, -1)
        middle = rows.shape[-1] // 2
        return rows[..., : self.head_dim], rows[..., middle : middle + self.head_dim]


def float_of_bits(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of what arrays of `dtype` hold in the XLA layout."""
    return next((number for number, bits in _BITS.items() if bits == dtype), dtype)


def as_bits(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the array's bits as numbers of a dtype of the same width."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def layout_of_arrays(kv: tuple[jax.Array, ...], head_dim: int, backend: str) -> KVLayout:
    """Returns the layout in which a backend takes the first array; the arrays have its shapes if they fit together."""
    first, second, third = kv[0].shape[1:]
    if backend == "tpu":
        num_kv_heads, block_size = first // planes_per_head(head_dim), second
    elif backend == "xla":
        num_kv_heads, block_size = first, third
    else:
        num_kv_heads, block_size = second, first
    return KVLayout(
        backend=backend,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=float_of_bits(kv[0].dtype) if backend == "xla" else kv[0].dtype,
        values_are_keys=len(kv) == 1,
    )


def pack_planes(k: jax.Array, v: jax.Array) -> jax.Array:
    """Puts rows of keys and values: [N, P, K, D] into planes: [N, planes, P, 128]."""
    num_blocks, block_size, num_kv_heads, head_dim = k.shape
    width = _HALF if head_dim <= _HALF else num_lane_tiles(head_dim) * LANES
    padding = ((0, 0), (0, 0), (0, 0), (0, width - head_dim))
    rows = jnp.concatenate([jnp.pad(k, padding), jnp.pad(v, padding)], axis=-1)
    tiles = rows.reshape(num_blocks, block_size, num_kv_heads, -1, LANES)
    return tiles.transpose(0, 2, 3, 1, 4).reshape(num_blocks, -1, block_size, LANES)
