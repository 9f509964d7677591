import pytest

from pallas_kernels.aot import baseline
from pallas_kernels.aot.program import Trips
from pallas_kernels.aot.shapes import ATTENTION_SHAPES, AttentionShape, Batch, Heads
from pallas_kernels.aot.targets import TPU_TARGETS

V6E = TPU_TARGETS["v6e"]
HEADS = Heads(model="m", num_heads=32, num_kv_heads=8, head_dim=128)


def test_sizes_are_those_of_the_nearest_tuned_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        ("bfloat16", "bfloat16", 32, 8, 128, 128, 64, 1024): (8, 32),
        ("bfloat16", "bfloat16", 32, 8, 128, 128, 64, 4096): (2, 16),
        ("bfloat16", "bfloat16", 32, 4, 128, 128, 64, 2048): (1, 8),
        ("float32", "bfloat16", 32, 8, 128, 128, 64, 2048): (1, 4),
    }
    monkeypatch.setattr(baseline, "TUNED_BLOCK_SIZES", {"TPU v6": table})
    program = baseline.build(ATTENTION_SHAPES["Llama-3-8B decode-64x2048"], V6E)
    keywords = program.function.keywords  # type: ignore[attr-defined]
    assert (keywords["num_kv_pages_per_block"], keywords["num_queries_per_block"]) == (8, 32)


def test_trips_of_a_mixed_batch_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {("bfloat16", "bfloat16", 32, 8, 128, 128, 64, 1024): (2, 8)}
    monkeypatch.setattr(baseline, "TUNED_BLOCK_SIZES", {"TPU v6": table})
    batch = Batch(name="b", query_lens=(10, 1, 1), seq_lens=(300, 257, 20))
    program = baseline.build(AttentionShape(heads=HEADS, batch=batch), V6E)
    # Blocks of 8 queries: the first sequence is in both, the others in the second one. Tiles of 256 tokens.
    assert program.trips["ragged_paged_attention_kernel"] == Trips((2, 2 + 1 + 1, 2 * 2 + 2 + 1))
    assert program.work.moved_bytes == 7 * 256 * 4096 + 2 * 12 * 32 * 128 * 2


def test_many_kv_heads_are_taken_in_blocks() -> None:
    gemma = baseline.build(ATTENTION_SHAPES["Gemma-3-27B decode-64x2048"], V6E)
    llama = baseline.build(ATTENTION_SHAPES["Llama-3-8B decode-64x2048"], V6E)
    name = "ragged_paged_attention_kernel"
    assert gemma.trips[name].bodies[0] == 2 * llama.trips[name].bodies[0]
    assert gemma.work.first_bytes == llama.work.first_bytes


def test_heads_that_the_kernel_cannot_tile_are_refused() -> None:
    with pytest.raises(ValueError, match="can not be XLA fully tiled"):
        baseline.build(ATTENTION_SHAPES["SmolLM2-135M decode-64x2048"], V6E)
