"""Rotary position embedding, with the stretchings of it that long-context checkpoints ask for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.exceptions import UnsupportedModelError
from jaxllm.layers.turns import cos_sin

SCALINGS = ("default", "linear", "llama3", "longrope", "yarn")
_TRAINED_LEN = "original_max_position_embeddings"


@dataclass(frozen=True)
class Rope:
    """How a layer's queries and keys are rotated. Static: changing it recompiles.

    Attributes:
      frequencies: Radians a position of each pair of a head's elements. Elements past two times their number
        are left alone.
      magnitude: What the rotated elements are multiplied with.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotates x: [T, H, D] by positions: [T] int32."""
        num_rotated = 2 * len(self.frequencies)
        rotated = rotate(x[..., :num_rotated], positions, self.frequencies, self.magnitude)
        return rotated if num_rotated == x.shape[-1] else jnp.concatenate([rotated, x[..., num_rotated:]], axis=-1)

    def reach(self, x: jax.Array) -> jax.Array:
        """Returns the largest magnitude that each element of x: [..., D], rotated, can have at another position.

        For the two elements of a pair that is the pair's length. Example: one pair (3, -4) reaches (5, 5).
        """
        first, second, rest = jnp.split(x, (len(self.frequencies), 2 * len(self.frequencies)), axis=-1)
        lengths = jnp.hypot(first, second)
        return jnp.concatenate([lengths, lengths, jnp.abs(rest)], axis=-1)


def make_rope(num_rotated: int, theta: float, scaling: dict[str, Any] | None) -> Rope:
    """Makes the rotation that a config asks for.

    Args:
      num_rotated: Elements of each head that are rotated, even; usually all D.
      theta: Base of the wavelengths, rope_theta in configs.
      scaling: rope_scaling of the config, or None. Kinds as in SCALINGS.

    Raises:
      UnsupportedModelError: The scaling is of another kind.
    """
    frequencies = rope_frequencies(num_rotated, theta, scaling)
    return Rope(tuple(frequencies.tolist()), _magnitude(scaling))


def for_context(scaling: dict[str, Any] | None, max_len: int, max_model_len: int) -> dict[str, Any] | None:
    """Settles what a scaling leaves open until the context is known.

    Longrope has factors for texts up to the trained length and others for longer ones. Keys in the cache can't change
    from the one to the other, so the longest text that is served decides for all.

    Args:
      scaling: rope_scaling of the config, or None.
      max_len: Positions that the checkpoint allows.
      max_model_len: Positions that are served.
    """
    if scaling is None or _kind(scaling) != "longrope":
        return scaling
    trained_len = scaling[_TRAINED_LEN]
    name = "long_factor" if max_model_len > trained_len else "short_factor"
    return {"factor": max_len / trained_len, **scaling, "factors": scaling[name]}


def rope_frequencies(num_rotated: int, theta: float, scaling: dict[str, Any] | None) -> np.ndarray:
    """Returns the angle a position of each pair of a head's elements, [num_rotated / 2] float32 radians.

    Raises:
      UnsupportedModelError: The scaling is of another kind than SCALINGS.
    """
    frequencies = theta ** (-np.arange(0, num_rotated, 2, dtype=np.float64) / num_rotated)
    kind = _kind(scaling)
    if kind not in SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind!r:.80} is not supported; supported: {', '.join(SCALINGS)}")
    if scaling is not None and kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif scaling is not None and kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif scaling is not None and kind == "yarn":
        frequencies = _yarn(frequencies, theta, scaling)
    elif scaling is not None and kind == "longrope":
        frequencies = _longrope(frequencies, scaling)
    return frequencies.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, frequencies: Sequence[float], magnitude: float = 1.0) -> jax.Array:
    """Rotates the first half of each head against its second half, by an angle that grows with the position.

    Args:
      x: [T, H, D] queries or keys.
      positions: [T] int32.
      frequencies: D / 2 numbers, from rope_frequencies.
      magnitude: Multiplies the result.

    Returns:
      [T, H, D] in x's dtype.
    """
    cos, sin = (array[:, None, :] for array in cos_sin(positions, frequencies))  # [T, 1, D/2] each
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _kind(scaling: dict[str, Any] | None) -> str:
    return "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))


def _llama3(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = scaling[_TRAINED_LEN] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept_share = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept_share + (1 - kept_share) / scaling["factor"])


def _yarn(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """YaRN's rule: as Llama 3's, but blended linearly by the pair's index, between two numbers of turns."""
    num_rotated, original_len = 2 * len(frequencies), scaling[_TRAINED_LEN]

    def index_of(num_turns: float) -> float:
        """Where the wave that makes num_turns in the original context stands among the pairs."""
        return num_rotated * math.log(original_len / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_rotated - 1)
    stretched_share = np.clip((np.arange(len(frequencies)) - low) / (max(high - low, 0) or 0.001), 0, 1)
    return frequencies * (1 - stretched_share + stretched_share / scaling["factor"])


def _longrope(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """LongRoPE's rule: each wavelength has a factor of its own. `factors` comes from for_context."""
    factors = np.asarray(scaling["factors"], np.float64)
    if factors.shape != frequencies.shape:
        raise UnsupportedModelError(f"longrope needs {len(frequencies)} factors, got {factors.size}")
    return frequencies / factors


def _magnitude(scaling: dict[str, Any] | None) -> float:
    """Returns what rotated elements are multiplied with."""
    kind = _kind(scaling)
    if scaling is None or kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    if kind == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(scaling[_TRAINED_LEN]))
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dims:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dims)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Returns YaRN's growth of the attention's magnitude with the stretching: 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
