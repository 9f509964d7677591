"""The KV cache's layouts: what goes in comes out, and the TPU's planes lie where its docstring says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.kv_layout import KVLayout, layout_of_arrays


def _layout(backend: str, num_kv_heads: int, head_dim: int) -> KVLayout:
    return KVLayout(
        backend=backend, block_size=4, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=jnp.dtype(jnp.float32)
    )


@pytest.mark.parametrize("backend", ["tpu", "triton", "xla", "reference"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (2, 80), (1, 128), (2, 256), (4, 16)])
def test_what_is_packed_comes_out_again(backend: str, num_kv_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 5, 4, num_kv_heads, head_dim)).astype(np.float32)
    layout = _layout(backend, num_kv_heads, head_dim)
    kv = layout.pack(jnp.asarray(k), jnp.asarray(v))
    assert tuple(array.shape for array in kv) == layout.shapes(5)
    assert sum(array.nbytes for array in kv) == 5 * layout.block_bytes
    assert layout_of_arrays(kv, head_dim, backend) == dataclasses.replace(layout, values_are_keys=len(kv) == 1)
    for array in kv:  # whole heads lie along the axis that devices share
        assert array.shape[layout.head_axis] % num_kv_heads == 0
    for mine, packed in zip((k, v), layout.unpack(kv), strict=True):
        np.testing.assert_array_equal(mine, packed)


@pytest.mark.parametrize("backend", ["triton", "xla", "reference"])
def test_values_that_are_keys_are_stored_once(backend: str) -> None:
    layout = dataclasses.replace(_layout(backend, 1, 80), values_are_keys=True)
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((5, 4, 1, 80)), jnp.float32)
    (array,) = kv = layout.pack(rows, rows)
    assert array.nbytes == 5 * layout.block_bytes == rows.nbytes
    for unpacked in layout.unpack(kv):
        np.testing.assert_array_equal(unpacked, rows)


def test_the_products_operands_lie_as_documented() -> None:
    k = jnp.arange(4 * 2 * 3, dtype=jnp.float32).reshape(1, 4, 2, 3)  # 4 tokens, 2 heads, 3 numbers
    keys, values = _layout("xla", 2, 3).pack(k, -k)
    assert keys[0, 1].tolist() == [[3, 9, 15, 21], [4, 10, 16, 22], [5, 11, 17, 23]]
    assert values[0, 1].tolist() == [[-3, -4, -5], [-9, -10, -11], [-15, -16, -17], [-21, -22, -23]]


def test_planes_lie_as_documented() -> None:
    k = jnp.arange(2 * 80, dtype=jnp.float32).reshape(1, 1, 2, 80) + 1
    (kv,) = _layout("tpu", 2, 80).pack(jnp.repeat(k, 4, axis=1), jnp.repeat(-k, 4, axis=1))
    assert kv.shape == (1, 4, 4, 128)
    assert np.asarray(kv[0, :, 0, 0]).tolist() == [1, -1, 81, -81]
    assert np.asarray(kv[0, :, 3, 79]).tolist() == [80, -80, 160, -160]
    assert not kv[..., 80:].any()
    small = jnp.ones((1, 4, 3, 64))
    (kv,) = _layout("tpu", 3, 64).pack(small, 2 * small)
    assert kv.shape == (1, 3, 4, 128) and (kv[..., :64] == 1).all() and (kv[..., 64:] == 2).all()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend must be one of tpu, triton, xla, reference, got 'cpu'"):
        _layout("cpu", 1, 64)
