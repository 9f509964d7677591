"""Rotary position embedding, with the stretchings of it that long-context checkpoints ask for."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.exceptions import UnsupportedModelError

SCALINGS = ("default", "linear", "llama3")


def rope_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> np.ndarray:
    """Returns the angle a position of each pair of a head's elements.

    Args:
      head_dim: D, even.
      theta: Base of the wavelengths, rope_theta in configs.
      scaling: rope_scaling of the config, or None. Kinds as in SCALINGS.

    Returns:
      [D / 2] float32 radians.

    Raises:
      UnsupportedModelError: The scaling is of another kind.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    if scaling is not None and kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif scaling is not None and kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    return frequencies.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Rotates the first half of each head against its second half, by an angle that grows with the position.

    Args:
      x: [T, H, D] queries or keys.
      positions: [T] int32.
      frequencies: [D / 2] from rope_frequencies.

    Returns:
      [T, H, D] in x's dtype.
    """
    angles = positions.astype(jnp.float32)[:, None] * frequencies  # [T, D/2]
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]  # [T, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept_share = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept_share + (1 - kept_share) / scaling["factor"])
