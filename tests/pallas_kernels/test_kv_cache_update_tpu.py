"""The TPU's cache kernels, interpreted with races detected, against the same writes in the split layout."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_cache_update import kv_cache_update
from pallas_kernels.kv_cache_update.tpu import copy_blocks_tpu, list_writes, write_planes
from pallas_kernels.paged_attention import KVLayout
from pallas_kernels.paged_attention.kv_layout import pack_planes
from tests.fakes.tpu_interpreter import interpreted

_NUM_BLOCKS, _NUM_TOKENS = 10, 48
_write = interpreted(write_planes)
_copy_blocks = interpreted(copy_blocks_tpu)

# (first position, tokens) of each sequence's write: within a piece, across pieces, across blocks.
_RUNS = st.lists(
    st.sampled_from([(0, 1), (7, 1), (15, 1), (16, 1), (31, 1), (3, 11), (0, 16), (5, 30), (14, 3)]), max_size=3
)


@pytest.fixture(autouse=True)
def _few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they are used again within a test."""
    monkeypatch.setattr("pallas_kernels.kv_cache_update.tpu.MAX_PIECES", 2)


def _slots(runs: list[tuple[int, int]], block_size: int, seed: int) -> np.ndarray:
    """Gives each run blocks of its own and pads to _NUM_TOKENS."""
    free = iter(np.random.default_rng(seed).permutation(np.arange(1, _NUM_BLOCKS)))
    slots: list[int] = []
    for first, num_tokens in runs:
        blocks = [next(free) for _ in range(-(-(first + num_tokens) // block_size))]
        positions = range(first, first + num_tokens)
        slots += [int(blocks[position // block_size]) * block_size + position % block_size for position in positions]
    slots = slots[:_NUM_TOKENS]
    return np.array(slots + [0] * (_NUM_TOKENS - len(slots)), np.int32)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (3, 64, 16, jnp.bfloat16),
        (2, 128, 32, jnp.float32),
        (1, 256, 16, jnp.int8),
        (2, 80, 64, jnp.float8_e4m3fn),
    ],
)
def test_planes_hold_the_rows_of_the_split_layout(num_kv_heads, head_dim, block_size, dtype, capfd):
    rng = np.random.default_rng(0)
    caches = rng.standard_normal((2, _NUM_BLOCKS, block_size, num_kv_heads, head_dim)) * 20
    k_cache, v_cache = (jnp.asarray(cache, dtype) for cache in caches)
    k, v = (jnp.asarray(rows * 20, dtype) for rows in rng.standard_normal((2, _NUM_TOKENS, num_kv_heads, head_dim)))
    layout = KVLayout(
        backend="tpu", block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=jnp.dtype(dtype)
    )
    (planes,) = layout.pack(k_cache, v_cache)

    @settings(max_examples=6)
    @given(runs=_RUNS, seed=st.integers(0, 100))
    def check(runs: list[tuple[int, int]], seed: int) -> None:
        slots = _slots(runs, block_size, seed)
        written = _write(planes, pack_planes(k[:, None], v[:, None])[:, :, 0], slots)
        split = kv_cache_update((k_cache, v_cache), k, v, jnp.asarray(slots), backend="reference")
        for mine, expected in zip(layout.unpack((written,)), split, strict=True):
            np.testing.assert_array_equal(np.asarray(mine, np.float32)[1:], np.asarray(expected, np.float32)[1:])
        assert "RACE DETECTED" not in capfd.readouterr().out

    check()


def test_writes_of_an_example_by_hand():
    slots = jnp.array([0, 100, 101, 30, 31, 32, 48, 47, 0, 0], jnp.int32)
    writes = list_writes(slots, block_size=16, rows=16)
    count = int(writes.num_writes[0])
    assert [column[:count].tolist() for column in writes[1:]] == [
        [1, 3, 5, 6, 7],
        [100, 30, 32, 48, 47],
        [2, 2, 1, 1, 1],
    ]


def test_blocks_are_copied_and_padding_is_not(capfd):
    cache = jnp.arange(6.0).reshape(6, 1, 1, 1) * jnp.ones((1, 2, 8, 128))
    out = _copy_blocks(cache, jnp.array([4, 1, 1, 0]), jnp.array([5, 2, 3, 0]))
    np.testing.assert_array_equal(out, cache[jnp.array([0, 1, 1, 1, 4, 4])])
    assert "RACE DETECTED" not in capfd.readouterr().out
