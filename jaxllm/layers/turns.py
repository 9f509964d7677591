"""Cosine and sine of position times frequency. Knows nothing of heads and of what is rotated.

Angles are counted in 32-bit fractions of a turn: an unsigned product that overflows loses whole turns and nothing
else, so the angle is as good at position 100,000 as at 1, where float32 would be off by 0.004 radians. And all
operations are ones that XLA:CPU vectorizes in jax 0.10; its cosine there took a twentieth of a decode step.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_TURN = 2**32
_QUARTER_BITS = 30
# Minimax polynomials in the square of an angle of at most an eighth of a turn: sinf and cosf of Cephes.
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def cos_sin(positions: jax.Array, frequencies: Sequence[float]) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of each position times each frequency, both [T, F] float32, within 2e-7.

    Args:
      positions: [T] int32.
      frequencies: F numbers, radians a position. Each counts as the nearest 32-bit fraction of a turn: an angle is
        off by at most position * 7.4e-10 radians.
    """
    fractions = np.round(np.asarray(frequencies, np.float64) / (2 * math.pi) * _TURN) % _TURN
    turns = positions.astype(jnp.uint32)[:, None] * fractions.astype(np.uint32)  # [T, F]
    quarters = (turns + np.uint32(_TURN // 8)) >> _QUARTER_BITS  # the nearest number of quarter turns, 0..3
    rest = jax.lax.bitcast_convert_type(turns - (quarters << _QUARTER_BITS), jnp.int32)
    angles = rest.astype(jnp.float32) * np.float32(2 * math.pi / _TURN)  # within an eighth of a turn of 0
    squares = angles * angles
    sin = angles + angles * squares * _polynomial(squares, _SIN)
    cos = 1 - squares / 2 + squares * squares * _polynomial(squares, _COS)
    is_odd = (quarters & 1) == 1
    cos, sin = jnp.where(is_odd, sin, cos), jnp.where(is_odd, cos, sin)
    return jnp.where((quarters == 1) | (quarters == 2), -cos, cos), jnp.where(quarters >= 2, -sin, sin)


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """Returns the polynomial's value at x; the highest coefficient comes first."""
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value
