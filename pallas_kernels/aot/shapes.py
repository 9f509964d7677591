"""The table of shapes: attention of real models in the steps that a server runs. Knows no kernel and no chip."""

import dataclasses
from collections.abc import Hashable

_CACHE_TOKENS = 1 << 19


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention of one model on one device."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step: how many new tokens each sequence has, and how many tokens it has with them."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One row of the table, before kernel and target."""

    heads: Heads
    batch: Batch
    kv_dtype: str = "bfloat16"
    block_size: int = 128

    @property
    def name(self) -> str:
        kv = {"bfloat16": "", "int8": " int8-kv", "float8_e4m3fn": " fp8-kv"}[self.kv_dtype]
        return f"{self.heads.model} {self.batch.name}{kv}"

    @property
    def program(self) -> Hashable:
        """Equal for shapes that make the same programs: some models have the same heads."""
        return dataclasses.replace(self, heads=dataclasses.replace(self.heads, model=""))

    @property
    def blocks_per_seq(self) -> int:
        return -(-max(self.batch.seq_lens) // self.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole cache. A server's cache is large; a small one XLA would keep in a TPU's own memory."""
        return max(_CACHE_TOKENS // self.block_size, 1 + self.batch.num_seqs * self.blocks_per_seq)

    @property
    def read_tokens(self) -> int:
        """KV tokens that some query of the step can see, summed over sequences."""
        window = self.heads.sliding_window
        pairs = zip(self.batch.query_lens, self.batch.seq_lens, strict=True)
        return sum(min(seq, query + window - 1) if window else seq for query, seq in pairs)

    @property
    def score_pairs(self) -> int:
        """Pairs of a query token and a KV token that it sees, one head."""
        return sum(
            min(position + 1, self.heads.sliding_window or position + 1)
            for query, seq in zip(self.batch.query_lens, self.batch.seq_lens, strict=True)
            for position in range(seq - query, seq)
        )

    @property
    def needed_bytes(self) -> int:
        """What a perfect kernel moves: each visible KV token once, queries and outputs once, nothing padded."""
        heads = self.heads
        kv_bytes = 2 * heads.num_kv_heads * heads.head_dim * (2 if self.kv_dtype == "bfloat16" else 1)
        qo_bytes = 2 * heads.num_heads * heads.head_dim * 2
        return self.read_tokens * kv_bytes + self.batch.num_tokens * qo_bytes

    @property
    def needed_flops(self) -> int:
        """Two matrix products over the pairs that the mask lets through."""
        return 4 * self.score_pairs * self.heads.num_heads * self.heads.head_dim


LLAMA_3_8B = Heads(model="Llama-3-8B", num_heads=32, num_kv_heads=8, head_dim=128)
MODELS = (
    LLAMA_3_8B,
    Heads(model="Llama-3-70B/TP8", num_heads=8, num_kv_heads=1, head_dim=128),
    Heads(model="Qwen3-4B", num_heads=32, num_kv_heads=8, head_dim=128),
    Heads(model="Qwen3-32B", num_heads=64, num_kv_heads=8, head_dim=128),
    Heads(model="Gemma-3-27B", num_heads=32, num_kv_heads=16, head_dim=128, sliding_window=1024),
    Heads(model="SmolLM2-135M", num_heads=9, num_kv_heads=3, head_dim=64),
    Heads(model="Mixtral-8x7B", num_heads=32, num_kv_heads=8, head_dim=128),
)
DECODE_64 = Batch(name="decode-64x2048", query_lens=(1,) * 64, seq_lens=(2048,) * 64)
DECODE_256 = Batch(name="decode-256x2048", query_lens=(1,) * 256, seq_lens=(2048,) * 256)
PREFILL = Batch(name="prefill-2048", query_lens=(2048,), seq_lens=(2048,))
# A chunk of a prompt among decoding sequences, longest query first.
MIXED = Batch(name="mixed-512+32", query_lens=(512, *(1,) * 32), seq_lens=(2048,) * 33)
BATCHES = (DECODE_64, DECODE_256, PREFILL, MIXED)
ATTENTION_SHAPES = {
    shape.name: shape
    for shape in (
        *(AttentionShape(heads=heads, batch=batch) for heads in MODELS for batch in BATCHES),
        AttentionShape(heads=LLAMA_3_8B, batch=DECODE_64, kv_dtype="int8"),
        AttentionShape(heads=LLAMA_3_8B, batch=DECODE_64, kv_dtype="float8_e4m3fn"),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """One weight of a model, quantized, and the tokens of a step."""

    weight: str  # model and layer
    num_tokens: int
    num_inputs: int
    num_outputs: int
    scheme: str  # w8a8: int8 by int8; w8 and w4: weight-only int8, and int4 with groups of 128 inputs

    @property
    def name(self) -> str:
        return f"{self.weight} {self.scheme} T{self.num_tokens}"

    @property
    def program(self) -> Hashable:
        """Equal for shapes that make the same programs."""
        return self

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return 128 if self.scheme == "w4" else self.num_inputs

    @property
    def weight_bytes(self) -> int:
        """Of the numbers, without scales."""
        return self.num_inputs * self.num_outputs // (2 if self.scheme == "w4" else 1)


MATMUL_SHAPES = {
    shape.name: shape
    for shape in (
        MatmulShape(weight=weight, num_tokens=tokens, num_inputs=inputs, num_outputs=outputs, scheme=scheme)
        for weight, inputs, outputs in (
            ("Llama-3-8B gate_up", 4096, 28672),
            ("Llama-3-8B down", 14336, 4096),
            ("Llama-3-70B/TP8 gate_up", 8192, 7168),
        )
        for scheme in ("w8a8", "w8", "w4")
        for tokens in (64, 2048)
    )
}
