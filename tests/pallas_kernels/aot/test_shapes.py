from pallas_kernels.aot.shapes import ATTENTION_SHAPES, AttentionShape, Batch, Heads

TINY = Heads(model="tiny", num_heads=4, num_kv_heads=2, head_dim=8)


def test_needs_of_a_small_batch_by_hand() -> None:
    batch = Batch(name="b", query_lens=(3, 1), seq_lens=(5, 10))
    shape = AttentionShape(heads=TINY, batch=batch, block_size=4)
    assert shape.read_tokens == 15
    assert shape.score_pairs == (3 + 4 + 5) + 10
    # Keys and values of 2 heads of 8 bf16 elements: 64 bytes a token; queries and outputs 128 bytes a token.
    assert shape.needed_bytes == 15 * 64 + 4 * 128
    assert shape.needed_flops == 22 * 4 * (2 * 8 + 2 * 8)
    assert shape.blocks_per_seq == 3


def test_a_window_hides_context() -> None:
    heads = Heads(model="tiny", num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=4)
    shape = AttentionShape(heads=heads, batch=Batch(name="b", query_lens=(3, 1), seq_lens=(9, 10)))
    # Queries at 6, 7, 8 see 3..8; the one at 9 sees 6..9.
    assert shape.read_tokens == 6 + 4
    assert shape.score_pairs == 4 * 4


def test_a_window_longer_than_the_context_hides_nothing() -> None:
    heads = Heads(model="tiny", num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=100)
    shape = AttentionShape(heads=heads, batch=Batch(name="b", query_lens=(3, 1), seq_lens=(5, 10)))
    assert (shape.read_tokens, shape.score_pairs) == (15, 22)


def test_the_table_has_every_model_in_every_batch() -> None:
    bf16 = [shape for shape in ATTENTION_SHAPES.values() if shape.kv_dtype == "bfloat16"]
    assert len(bf16) == 7 * 4
    assert "Gemma-3-27B decode-256x2048" in ATTENTION_SHAPES
    assert "Llama-3-8B decode-64x2048 fp8-kv" in ATTENTION_SHAPES
    assert ATTENTION_SHAPES["Llama-3-70B/TP8 prefill-2048"].heads.num_kv_heads == 1
