"""The TPU kernels, interpreted with races detected and fresh memory full of NaN, against the oracle in numpy."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_cache_update import quantize_kv
from pallas_kernels.paged_attention import KVLayout
from pallas_kernels.paged_attention.tpu import paged_attention_tpu
from pallas_kernels.paged_attention.tpu_config import TileSizes, TpuConfig, decode_config, prefill_config
from pallas_kernels.paged_attention.tpu_pipeline import Batch, find_row
from tests.fakes.attention_batches import attention_oracle, make_batch
from tests.fakes.tpu_interpreter import interpreted

# Small, so that short sequences have several tiles, several parts in a tile and several rows.
_SIZES = TileSizes(kv_buffer_bytes=1, decode_tokens=128, prefill_tokens=128, prefill_rows=1)
# What chips with wide matrix units do, with masked parts in several steps.
_WIDE_SIZES = TileSizes(
    kv_buffer_bytes=1 << 20,
    prefill_tokens=256,
    prefill_masked_tokens=128,
    prefill_rows=1,
    row_block=32,
    prefill_units=2,
    sums_by_products=1,
)
_TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
_STATIC = ("scale", "sliding_window", "logit_soft_cap", "k_scale", "v_scale", "sizes")
_attend = interpreted(paged_attention_tpu, static_argnames=_STATIC)

# (query length, context before it): none at all, decode, block, part and row edges, several parts and rows.
_SEQUENCES = st.lists(
    st.sampled_from(
        [
            *[(0, 0), (1, 0), (1, 15), (1, 16), (1, 127), (1, 128), (1, 255), (1, 511)],
            *[(2, 0), (5, 30), (16, 112), (17, 3), (18, 380)],
        ]
    ),
    min_size=1,
    max_size=4,
)
_SHAPE = {"num_seqs": 5, "num_tokens": 80}
_CONTEXT = 512


@dataclass(frozen=True)
class _Case:
    """What a kernel is compiled for: one compilation for all drawn batches."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    options: tuple[tuple[str, float], ...] = ()
    has_sinks: bool = False
    sizes: TileSizes = _SIZES

    def check(self, sequences: list[tuple[int, int]], seed: int) -> None:
        """Runs the kernels on a drawn batch and compares."""
        shape = {"num_kv_heads": self.num_kv_heads, "group": self.group, "head_dim": self.head_dim}
        table_width = _CONTEXT // self.block_size
        shape |= {**_SHAPE, "block_size": self.block_size, "table_width": table_width, "seed": seed}
        batch = make_batch(sequences, num_blocks=4 * table_width + 2, **shape)
        kv_dtype = jnp.dtype(self.kv_dtype or self.dtype)
        options = dict(self.options)
        stored = {name: getattr(batch, name) for name in ("k_cache", "v_cache")}
        if kv_dtype.itemsize == 1:
            stored = {name: quantize_kv(cache, options[f"{name[0]}_scale"], kv_dtype) for name, cache in stored.items()}
        batch = batch._replace(
            q=np.asarray(batch.q, self.dtype), **{name: np.asarray(cache, kv_dtype) for name, cache in stored.items()}
        )
        layout = KVLayout(
            backend="tpu",
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=kv_dtype,
        )
        (kv,) = layout.pack(jnp.asarray(batch.k_cache), jnp.asarray(batch.v_cache))
        scale = self.head_dim**-0.5
        sinks = np.linspace(-2, 2, self.num_kv_heads * self.group, dtype=np.float32) if self.has_sinks else None
        out = _attend(batch.q, kv, *batch[3:], scale=scale, sinks=sinks, sizes=self.sizes, **options)
        assert out.dtype == self.dtype and out.shape == batch.q.shape
        exact = batch._replace(**{name: getattr(batch, name).astype(np.float32) for name in batch._fields[:3]})
        expected = attention_oracle(exact, scale=scale, sinks=sinks, **options)
        real, tolerance = np.asarray(out, np.float32)[: batch.num_real], _TOLERANCES[self.dtype]
        np.testing.assert_allclose(real, expected, rtol=tolerance, atol=tolerance)


def _case(*heads: int, has_sinks: bool = False, **others) -> _Case:
    names = ("block_size", "dtype", "kv_dtype", "sizes")
    shape = {name: others.pop(name) for name in names if name in others}
    return _Case(*heads, **shape, options=tuple(others.items()), has_sinks=has_sinks)


_CASES = {
    "llama": _case(2, 4, 128),
    "smollm2_bfloat16": _case(3, 3, 64, dtype="bfloat16"),
    "window": _case(1, 2, 128, block_size=32, sliding_window=20),
    "gemma2_bfloat16": _case(1, 2, 256, dtype="bfloat16", logit_soft_cap=5.0, sliding_window=100),
    "sinks": _case(2, 8, 64, block_size=64, sliding_window=128, has_sinks=True),
    "mha_80_bfloat16": _case(2, 1, 80, block_size=256, dtype="bfloat16"),
    "int8": _case(2, 1, 96, block_size=32, kv_dtype="int8", k_scale=0.03, v_scale=0.02),
    "wide": _case(4, 4, 128, sizes=_WIDE_SIZES),
    "wide_window_sinks": _case(3, 2, 64, sizes=_WIDE_SIZES, sliding_window=200, has_sinks=True),
    "wide_bfloat16": _case(4, 4, 80, block_size=128, dtype="bfloat16", sizes=_WIDE_SIZES),
    "wide_gemma2": _case(1, 2, 256, sizes=_WIDE_SIZES, logit_soft_cap=5.0),
    "fp8_bfloat16": _case(1, 8, 128, dtype="bfloat16", kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
}


@pytest.mark.parametrize("name", _CASES)
def test_agrees_with_the_oracle_without_a_race(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    @settings(max_examples=3)
    @given(sequences=_SEQUENCES, seed=st.integers(0, 100))
    @example(sequences=[(1, 255), (17, 112), (0, 0), (1, 16)], seed=0)
    @example(sequences=[(18, 380), (1, 511), (5, 160)], seed=1)
    def check(sequences: list[tuple[int, int]], seed: int) -> None:
        _CASES[name].check(sequences, seed)
        assert "RACE DETECTED" not in capfd.readouterr().out

    check()


def test_the_rows_of_an_example_by_hand() -> None:
    """The example of Row's docstring, after a sequence that decodes and one that waits."""
    options = {"num_kv_heads": 1, "group": 1, "head_dim": 64, "block_size": 16, "table_width": 3, "scale": 1.0}
    options |= {"v_scale": 1.0, "sliding_window": 20, "logit_soft_cap": None, "has_sinks": False}
    dtypes = {"kv_dtype": jnp.dtype("float32"), "q_dtype": jnp.dtype("float32")}
    decode, prefill = decode_config(**options, **dtypes), replace(prefill_config(**options, **dtypes), query_tile=4)
    batch = Batch(jnp.arange(9), jnp.array([30, 0, 46]), jnp.array([6, 7, 7, 13]))
    assert _rows(decode, batch) == [(0, 0, 6, 1, 30, 0)]
    assert _rows(prefill, batch) == [(2, 0, 7, 4, 44, 1), (2, 4, 11, 2, 46, 1)]


def _rows(config: TpuConfig, batch: Batch) -> list[tuple[int, ...]]:
    rows, row = [], find_row(config, batch, jnp.int32(0), jnp.int32(0))
    while row.seq < batch.seq_lens.shape[0]:
        rows.append(tuple(int(value) for value in row))
        row = find_row(config, batch, row.seq, row.offset + config.query_tile)
    return rows
