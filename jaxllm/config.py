"""Frozen configuration. Facts learnt while running (block counts, say) live in KVCacheInfo, not here."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.exceptions import ConfigError
from jaxllm.quantization import SCHEMES, Scheme

DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
PREEMPTION_MODES = ("auto", "swap", "recompute")
POLICIES = ("fcfs", "priority")
EXECUTOR_BACKENDS = ("uni", "mp", "ray", "external_launcher")
UNIPROC_EXECUTOR = "jaxllm.executor.uniproc_executor:UniProcExecutor"
LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# What --kv-cache-dtype takes, and the dtype that it means; "auto" is the model's.
KV_CACHE_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model's shape, as its checkpoint states it. Field names are those of Hugging Face configs.

    Attributes:
      architecture: Class name in the registry, such as "LlamaForCausalLM".
      rms_norm_eps: Epsilon of the norms, of whatever kind.
      rope_scaling: The config's rope_scaling object, or None.
      partial_rotary_factor: Share of each head that is rotated, its first elements.
      hidden_act: Activation of the MLPs, one of ACTIVATIONS.
      sliding_window: Tokens that a windowed layer sees, its own included.
      has_latent_cache: Whether keys are values too, so that the KV cache needs one array a layer.
      layer_types: For each layer one of LAYER_TYPES; empty where all see everything.
      eos_token_ids: Token ids that end a text; may be empty.
      extra: What only some families read, by the config's own names.
      stored_scheme: What the checkpoint's quantized weights are multiplied as; None where they are, or become, floats.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    has_latent_cache: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    stored_scheme: Scheme | None = None

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"the model's {name} must be at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"the model's num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"the model's layer_types must name {self.num_hidden_layers} layers, got {len(self.layer_types)}"
            )

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def window(self, index: int) -> int | None:
        """Returns how many tokens layer `index` sees, its own included; None where it sees all."""
        is_sliding = bool(self.layer_types) and self.layer_types[index] == "sliding_attention"
        return self.sliding_window if is_sliding else None


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache.

    Attributes:
      block_size: Tokens a block; None picks by platform (64 on CPU, 16 on GPU, 128 on TPU).
      enable_prefix_caching: Whether requests share the blocks of equal prefixes.
      kv_cache_memory_bytes: Size of the device KV cache; None takes gpu_memory_utilization of an
        accelerator's memory, or 1 GiB on CPU.
      gpu_memory_utilization: Share of the accelerator's memory for weights, programs and KV cache.
      num_gpu_blocks_override: Number of device blocks, whatever the memory says.
      swap_space: Size of the host KV cache, which preempted groups are swapped to, in GiB.
      cache_dtype: What keys and values are stored as, a name in KV_CACHE_DTYPES; "auto" is the dtype of hidden states.
    """

    block_size: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    swap_space: float = 4
    cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.cache_dtype!r}; "
                "set --kv-cache-dtype"
            )
        size = self.block_size
        if size is not None and (not 1 <= size <= 256 or size & (size - 1)):
            raise ConfigError(f"block_size must be a power of two in [1, 256], got {size}; set --block-size")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(
                f"kv_cache_memory_bytes must be at least 1, got {self.kv_cache_memory_bytes}; set --kv-cache-memory"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.swap_space < float("inf"):
            raise ConfigError(f"swap_space must be at least 0 GiB, got {self.swap_space}; set --swap-space")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise ConfigError(
                f"num_gpu_blocks_override must be at least 2 (block 0 is the null block), "
                f"got {self.num_gpu_blocks_override}"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The batch.

    Attributes:
      max_num_seqs: Most sequences in one step.
      max_num_batched_tokens: Most tokens in one step; longer prompts are computed in chunks.
      max_model_len: Most tokens of a sequence, prompt and output together.
      policy: "fcfs", or "priority": the lower number first, ties by arrival.
      enable_chunked_prefill: Whether a step may hold parts of prompts, beside decode tokens. Otherwise it
        holds whole prompts or decode tokens.
      long_prefill_token_threshold: Most tokens of one prompt in one step; 0 sets no limit.
      max_num_partial_prefills: Prompts that one step may leave unfinished.
      watermark: Share of the KV cache that somebody who comes in must leave free.
      scheduler_delay_factor: While anything runs, prompts wait this many times the last prompt step's
        duration, so that more of them share a step.
      preemption_mode: What becomes of those who must give up their blocks. "swap": they go to host memory and
        resume there; "recompute": they are computed again; "auto": groups that may run several sequences are
        swapped, single sequences recomputed.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    watermark: float = 0.01
    scheduler_delay_factor: float = 0.0
    preemption_mode: str = "auto"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_num_partial_prefills"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}; set --{name.replace('_', '-')}"
                )
        for name in ("long_prefill_token_threshold", "scheduler_delay_factor"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} must be at least 0, got {getattr(self, name)}; set --{name.replace('_', '-')}"
                )
        if self.policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}; set --policy")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(
                f"preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, got {self.preemption_mode!r}; "
                "set --preemption-mode"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}; set --watermark")
        if not self.enable_chunked_prefill:
            self._check_whole_prompts()

    def _check_whole_prompts(self) -> None:
        if self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens must be at least max_model_len={self.max_model_len} without chunked prefill, "
                f"got {self.max_num_batched_tokens}; set --max-num-batched-tokens or --enable-chunked-prefill"
            )
        if self.long_prefill_token_threshold or self.max_num_partial_prefills > 1:
            raise ConfigError(
                "long_prefill_token_threshold and max_num_partial_prefills need chunked prefill, got "
                f"{self.long_prefill_token_threshold} and {self.max_num_partial_prefills}; set --enable-chunked-prefill"
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many devices work on the model, and in which roles.

    Attributes:
      tensor_parallel_size: Devices that share each layer: its heads, its MLP, its experts, the vocabulary.
      pipeline_parallel_size: Groups of such devices that hold consecutive layers.
      data_parallel_size: Replicas of the whole model, each with its own requests.
      data_parallel_rank: Which replica an engine core is, from 0; None: whoever is made from this has all of them.
      distributed_executor_backend: One of EXECUTOR_BACKENDS; None chooses.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    data_parallel_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}; set --{name.replace('_', '-')}"
                )
        backend = self.distributed_executor_backend
        if backend is not None and backend not in EXECUTOR_BACKENDS:
            raise ConfigError(
                f"distributed_executor_backend must be one of {', '.join(EXECUTOR_BACKENDS)}, got {backend!r}; "
                "set --distributed-executor-backend"
            )
        rank = self.data_parallel_rank
        if rank is not None and not 0 <= rank < self.data_parallel_size:
            raise ConfigError(f"data_parallel_rank must be in [0, {self.data_parallel_size}), got {rank}")

    @property
    def world_size(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that one engine is made from.

    Attributes:
      model_path: The .gguf file or the folder that holds the checkpoint.
      load_format: What the checkpoint is, one of LOAD_FORMATS: "auto" looks; "dummy" makes up weights at random.
      dtype: Compute dtype; "auto" is float32 on CPU and bfloat16 on accelerators.
      quantization: How weights are stored, a name in quantization.SCHEMES; None: as the checkpoint has them.
      seed: Seed of the requests that bring none; None draws one from the operating system.
      generation_config: Sampling defaults of requests, in the form of generation_config.json; empty: ours.
      executor_class: "module:class" of the executor. It is made in the engine's process, from this configuration.
    """

    model: ModelConfig
    model_path: Path
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    seed: int | None = None
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig = ParallelConfig()
    generation_config: dict[str, Any] = field(default_factory=dict)
    executor_class: str = UNIPROC_EXECUTOR

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}; set --dtype")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(
                f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format!r}; set --load-format"
            )
        if self.quantization is not None and self.quantization not in SCHEMES:
            raise ConfigError(
                f"quantization must be one of {', '.join(SCHEMES)}, got {self.quantization!r}; set --quantization"
            )

    def of_replica(self, rank: int) -> "EngineConfig":
        """Returns the configuration of one data parallel replica."""
        return replace(self, parallel=replace(self.parallel, data_parallel_rank=rank))
