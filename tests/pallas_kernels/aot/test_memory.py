import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.aot import memory, shapes
from pallas_kernels.aot.check import run_program
from pallas_kernels.aot.program import Trips
from pallas_kernels.aot.shapes import AttentionShape, Batch, Heads
from pallas_kernels.aot.targets import TPU_TARGETS
from pallas_kernels.kv_cache_update import copy_blocks, kv_cache_update

V6E = TPU_TARGETS["v6e"]
SHAPE = AttentionShape(
    heads=Heads(model="tiny", num_heads=2, num_kv_heads=2, head_dim=64),
    batch=Batch(name="b", query_lens=(20, 1), seq_lens=(25, 40)),
    block_size=32,
)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_CACHE_TOKENS", 4096)
    monkeypatch.setattr(memory, "_NUM_COPIES", 5)


def test_an_update_moves_whole_pieces_both_ways() -> None:
    program = memory.build_update(SHAPE, V6E)
    # Positions 5..24 lie in the pieces 0..15 and 16..31, position 39 in 32..47. A row is 2 planes of 128 bf16 lanes.
    assert program.trips == {"kv_cache_update": Trips((3,), copies=3)}
    assert program.work.moved_bytes == 2 * 3 * 16 * 512 + 21 * 512
    assert program.work.needed_bytes == 2 * 21 * (2 * 2 * 64 * 2)


def test_a_copy_reads_and_writes_each_block() -> None:
    program = memory.build_copy(SHAPE, V6E)
    assert program.work.moved_bytes == 2 * 5 * 32 * 512
    assert program.trips == {"copy_blocks": Trips((5,))}


def test_the_update_trial_tells_right_from_wrong() -> None:
    program = memory.build_update(SHAPE, V6E)
    right = dataclasses.replace(program, function=lambda *a: kv_cache_update(*a, backend="xla"))
    assert run_program(right, memory.update_trial(SHAPE, "xla"), V6E)[1] is None
    wrong = dataclasses.replace(program, function=lambda kv, k, v, s: kv_cache_update(kv, k, v, s + 1, backend="xla"))
    assert run_program(wrong, memory.update_trial(SHAPE, "xla"), V6E)[1] is not None


def test_the_copy_trial_tells_right_from_wrong() -> None:
    program = memory.build_copy(SHAPE, V6E)

    def copy(kv: tuple[jax.Array, ...], sources: jax.Array, destinations: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(copy_blocks(cache, sources, destinations, backend="xla") for cache in kv)

    right = dataclasses.replace(program, function=copy)
    assert run_program(right, memory.copy_trial(SHAPE, "xla"), V6E)[1] is None
    wrong = dataclasses.replace(program, function=lambda kv, s, d: copy(kv, s[::-1], d))
    assert run_program(wrong, memory.copy_trial(SHAPE, "xla"), V6E)[1] is not None


def test_slots_follow_the_block_tables() -> None:
    tables, _, _ = memory.attention_metadata(SHAPE)
    slots = memory._slots(SHAPE)
    assert slots.shape == (21,)
    np.testing.assert_array_equal(slots[:20], tables[0, 0] * 32 + np.arange(5, 25))
    assert slots[20] == tables[1, 1] * 32 + 7
