"""Rotary position embedding."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates the first half of each head against its second half, by an angle that grows with the position.

    Args:
      x: [T, H, D] queries or keys, D even.
      positions: [T] int32.
      theta: Base of the wavelengths, rope_theta in configs.

    Returns:
      [T, H, D] in x's dtype.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies  # [T, D/2]
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]  # [T, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
