"""EngineArgs: every engine argument, flat, for Python keyword arguments and command-line flags alike.

Flags are generated from the fields. Defaults come from config.py, which also checks the values; this
module only translates.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxllm.config import (
    DTYPES,
    EXECUTOR_BACKENDS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    POLICIES,
    PREEMPTION_MODES,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxllm.exceptions import ConfigError
from jaxllm.executor.choice import EXECUTOR_CLASSES, choose_backend
from jaxllm.model_loader.generation_config import choose_generation_config
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.model_loader.stored_quantization import METHODS, stored_method
from jaxllm.quantization import SCHEMES

if TYPE_CHECKING:
    from jaxllm.model_loader.checkpoint import OpenedModel

DEFAULT_MODEL = "smollm2"
# Taken where max_model_len isn't given and the model allows more: block tables grow with it.
DEFAULT_MAX_MODEL_LEN = 8192

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgt]|[KMGT](?:iB|B)?)?")
_EXPONENTS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Returns the number that `text` names: "32k" is 32000, "32K" and "32KiB" are 32768, "1GB" is 10**9.

    Raises:
      ValueError: `text` is no such number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r}")
    number, suffix = match.group(1), match.group(2) or ""
    is_decimal = suffix.islower() or suffix.endswith("B") and not suffix.endswith("iB")
    scale = (1000 if is_decimal else 1024) ** _EXPONENTS.get(suffix[:1].lower(), 0)
    value = float(number) * scale
    if not value.is_integer():
        raise ValueError(f"not a whole number: {text!r}")
    return int(number) * scale if number.isdigit() else int(value)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number such as 4096, 32k, 512M or 4GiB, got {text!r}") from None


def _arg(
    default: Any,
    help_text: str,
    parse: Callable[[str], Any] = str,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
) -> Any:
    return field(default=default, metadata={"help": help_text, "parse": parse, "flags": flags, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """What an engine is made from. Names are vLLM's; each field's meaning is its help text."""

    model: str = _arg(
        DEFAULT_MODEL, "the default model's name, a .gguf file, a Hugging Face directory, a converted one, or a hub id"
    )
    load_format: str = _arg(
        EngineConfig.load_format,
        "what the model's weights are; auto looks, orbax is what jaxllm.convert writes, dummy makes them up at random "
        "from config.json alone",
        choices=LOAD_FORMATS,
    )
    dtype: str = _arg(
        EngineConfig.dtype, "compute type; auto is float32 on CPU, bfloat16 on accelerators", choices=DTYPES
    )
    quantization: str | None = _arg(
        EngineConfig.quantization,
        "how weights are stored: int8 and fp8 products are of quantized activations, those of int8_wo and int4_wo "
        "of weights alone; if not given, or given by the checkpoint's own method, as the checkpoint has them",
        flags=("-q",),
        choices=tuple(dict.fromkeys((*SCHEMES, *METHODS))),
    )
    kv_cache_dtype: str = _arg(
        CacheConfig.cache_dtype,
        "what keys and values are stored as; auto is the compute type",
        choices=tuple(KV_CACHE_DTYPES),
    )
    max_model_len: int | None = _arg(
        None,
        f"most tokens of a sequence, prompt and output together (32k and 32K are understood); "
        f"if not given, the model's own limit, at most {DEFAULT_MAX_MODEL_LEN}",
        _size,
    )
    max_num_seqs: int = _arg(SchedulerConfig.max_num_seqs, "most sequences in one step", int)
    max_num_batched_tokens: int = _arg(
        SchedulerConfig.max_num_batched_tokens,
        "most tokens in one step; longer prompts are computed in chunks",
        _size,
    )
    block_size: int | None = _arg(
        CacheConfig.block_size,
        "tokens a KV cache block, a power of two; if not given, 64 on CPU, 16 on GPU, 128 on TPU",
        int,
    )
    enable_prefix_caching: bool = _arg(
        CacheConfig.enable_prefix_caching, "share the KV cache blocks of equal prompt beginnings"
    )
    kv_cache_memory_bytes: int | None = _arg(
        CacheConfig.kv_cache_memory_bytes,
        "size of the KV cache, such as 512M or 4GiB; if not given, 1 GiB on CPU, else by --gpu-memory-utilization",
        _size,
        flags=("--kv-cache-memory",),
    )
    gpu_memory_utilization: float = _arg(
        CacheConfig.gpu_memory_utilization, "share of the accelerator's memory to use, in (0, 1]", float
    )
    num_gpu_blocks_override: int | None = _arg(
        CacheConfig.num_gpu_blocks_override, "number of KV cache blocks, whatever the memory says", int
    )
    num_device_blocks_override: int | None = _arg(None, "another name of --num-gpu-blocks-override", int)
    swap_space: float = _arg(
        CacheConfig.swap_space, "size of the host KV cache that preempted requests are swapped to, in GiB", float
    )
    preemption_mode: str = _arg(
        SchedulerConfig.preemption_mode,
        "what requests do that must give up KV cache blocks: swap them to host memory, recompute them; "
        "auto swaps those of several sequences",
        choices=PREEMPTION_MODES,
    )
    policy: str = _arg(
        SchedulerConfig.policy,
        "who is served first: fcfs, the first that came; priority, the lowest number, then the first that came",
        choices=POLICIES,
    )
    enable_chunked_prefill: bool = _arg(
        SchedulerConfig.enable_chunked_prefill,
        "let a step hold parts of prompts beside decode tokens, else only whole prompts or decode tokens",
    )
    long_prefill_token_threshold: int = _arg(
        SchedulerConfig.long_prefill_token_threshold, "most tokens of one prompt in one step; 0 sets no limit", _size
    )
    max_num_partial_prefills: int = _arg(
        SchedulerConfig.max_num_partial_prefills, "prompts that one step may leave unfinished", int
    )
    watermark: float = _arg(
        SchedulerConfig.watermark, "share of the KV cache that a prompt must leave free, in [0, 1)", float
    )
    scheduler_delay_factor: float = _arg(
        SchedulerConfig.scheduler_delay_factor,
        "while anything runs, let prompts wait this many times the last prompt step's duration",
        float,
    )
    tensor_parallel_size: int = _arg(
        ParallelConfig.tensor_parallel_size,
        "devices that share each layer: its heads, its MLP, its experts, the vocabulary",
        int,
        flags=("-tp",),
    )
    pipeline_parallel_size: int = _arg(
        ParallelConfig.pipeline_parallel_size,
        "groups of such devices that hold consecutive layers; tp x pp devices hold the model",
        int,
        flags=("-pp",),
    )
    data_parallel_size: int = _arg(
        ParallelConfig.data_parallel_size, "replicas of the whole model behind one front end", int, flags=("-dp",)
    )
    distributed_executor_backend: str | None = _arg(
        ParallelConfig.distributed_executor_backend,
        "how a step reaches its workers: uni drives all local devices from this process, mp has a process a device, "
        "ray spreads over a cluster's hosts, external_launcher is for ranks that torchrun started; if not given, uni, "
        "or ray where RAY_ADDRESS is set and this machine has too few devices",
        choices=EXECUTOR_BACKENDS,
    )
    generation_config: str = _arg(
        "auto",
        "whose sampling defaults hold: auto, the model's own; vllm or jaxllm, ours; else those of the "
        "generation_config.json in this folder",
    )
    seed: int | None = _arg(
        EngineConfig.seed,
        "seeds the requests that bring no seed; if not given, they differ from run to run",
        int,
    )

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser, exclude: Collection[str] = ()) -> None:
        """Adds one flag a field, except the fields named in `exclude`."""
        group = parser.add_argument_group("engine")
        for item in dataclasses.fields(cls):
            if item.name not in exclude:
                _add_flag(group, item)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace, exclude: Collection[str] = ()) -> "EngineArgs":
        """Reads back what `add_cli_args` with the same `exclude` had parsed."""
        values = vars(namespace)
        return cls(**{item.name: values[item.name] for item in dataclasses.fields(cls) if item.name not in exclude})

    def create_engine_config(self, checkpoint: "OpenedModel") -> EngineConfig:
        """Returns the frozen configuration for one opened checkpoint.

        Raises:
          ConfigError: An argument breaks a rule.
          UnsupportedModelError: The checkpoint's model family is not one of ours.
        """
        model = model_config_from_hf(checkpoint.config)
        limit = model.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len must be at most {limit}, the model's own limit, got {self.max_model_len}; "
                "set --max-model-len"
            )
        default_len = min(limit, DEFAULT_MAX_MODEL_LEN)
        parallel = ParallelConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            data_parallel_size=self.data_parallel_size,
            distributed_executor_backend=self.distributed_executor_backend,
        )
        backend = choose_backend(parallel)
        return EngineConfig(
            model=model,
            model_path=checkpoint.path,
            load_format=self.load_format,
            dtype=self.dtype,
            quantization=self._stored_quantization(checkpoint),
            # Ranks that somebody else has started have no channel to agree on one.
            seed=0 if self.seed is None and backend == "external_launcher" else self.seed,
            generation_config=choose_generation_config(
                self.generation_config, checkpoint.generation_config, checkpoint.path
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                gpu_memory_utilization=self.gpu_memory_utilization,
                num_gpu_blocks_override=self._num_blocks_override(),
                swap_space=self.swap_space,
                cache_dtype=self.kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                # Each sequence of a step needs a token.
                max_num_seqs=min(self.max_num_seqs, self.max_num_batched_tokens),
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=default_len if self.max_model_len is None else self.max_model_len,
                policy=self.policy,
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                max_num_partial_prefills=self.max_num_partial_prefills,
                watermark=self.watermark,
                scheduler_delay_factor=self.scheduler_delay_factor,
                preemption_mode=self.preemption_mode,
            ),
            parallel=parallel if backend == "uni" else replace(parallel, distributed_executor_backend=backend),
            executor_class=EXECUTOR_CLASSES[backend],
        )

    def _stored_quantization(self, checkpoint: "OpenedModel") -> str | None:
        """Returns the scheme of the weights: what was asked for, or what the checkpoint has them in."""
        stored, method = checkpoint.quantization, stored_method(checkpoint.config)
        if self.quantization is not None and self.quantization == method:
            return None
        if self.quantization in METHODS and self.quantization not in SCHEMES:
            raise ConfigError(
                f"{checkpoint.path}: its weights are stored as {method or 'floats'}, got quantization "
                f"{self.quantization}, which is read but not made; leave --quantization out, or set "
                f"{', '.join(SCHEMES)}"
            )
        if stored is not None and self.quantization not in (None, stored):
            raise ConfigError(
                f"{checkpoint.path}: its weights are stored as {stored}, got quantization {self.quantization}; leave "
                "--quantization out, or convert the model again"
            )
        return stored or self.quantization

    def _num_blocks_override(self) -> int | None:
        """Returns the one setting that has two names."""
        gpu, device = self.num_gpu_blocks_override, self.num_device_blocks_override
        if gpu is not None and device is not None and gpu != device:
            raise ConfigError(
                "num_gpu_blocks_override and num_device_blocks_override are the same setting, "
                f"got {gpu} and {device}; set one of them"
            )
        return device if gpu is None else gpu


def _add_flag(group: argparse._ArgumentGroup, item: "dataclasses.Field[Any]") -> None:
    flags = (*item.metadata["flags"], f"--{item.name.replace('_', '-')}")
    help_text = item.metadata["help"]
    if isinstance(item.default, bool):
        # This action has written the default into the help by itself only since Python 3.13.
        default = "on" if item.default else "off"
        group.add_argument(
            *flags,
            dest=item.name,
            action=argparse.BooleanOptionalAction,
            default=item.default,
            help=f"{help_text} (default: {default})",
        )
        return
    if item.default is not None:
        help_text = f"{help_text} (default: {item.default})"
    group.add_argument(
        *flags,
        dest=item.name,
        type=item.metadata["parse"],
        default=item.default,
        choices=item.metadata["choices"],
        metavar=None if item.metadata["choices"] else item.name.split("_")[-1].upper(),
        help=help_text,
    )
