"""EngineArgs: sizes, flags, and the configuration they make."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config import CacheConfig, ParallelConfig, SchedulerConfig
from jaxllm.engine_args import EngineArgs, parse_size
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.exceptions import ConfigError


class TinyCheckpoint:
    """A checkpoint that is a config alone."""

    path = Path("tiny.gguf")
    generation_config: dict[str, Any] = {}
    quantization: str | None = None

    def __init__(self, max_position_embeddings: int) -> None:
        self.config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": max_position_embeddings,
        }

    def tensor_names(self) -> list[str]:
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)


def parse(*argv: str) -> EngineArgs:
    parser = ArgParser("test", "")
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse(argv))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("512M", 512 << 20),
        ("1G", 1 << 30),
        ("4GiB", 4 << 30),
        ("4GB", 4_000_000_000),
        ("1.5k", 1500),
        ("0.5G", 1 << 29),
        ("2T", 2 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1X", "1 G B", "1e3", "1.5", "nan", "1.0001k", "0x10", "1kib", "٣"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_no_flags_give_the_defaults() -> None:
    assert parse() == EngineArgs()
    assert EngineArgs().max_num_seqs == SchedulerConfig(max_model_len=1).max_num_seqs == 256
    assert EngineArgs().gpu_memory_utilization == CacheConfig().gpu_memory_utilization == 0.9


def test_every_flag() -> None:
    args = parse(
        *["--model", "m", "--dtype", "bfloat16", "--max-model-len", "32k", "--max-num-seqs", "3"],
        *["--max-num-batched-tokens", "2K", "--block-size", "32", "--no-enable-prefix-caching"],
        *["--kv-cache-memory", "512M", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "9"],
        *["--policy", "priority", "--no-enable-chunked-prefill", "--long-prefill-token-threshold", "1k"],
        *["--max-num-partial-prefills", "2", "--watermark", "0.25", "--scheduler-delay-factor", "0.5"],
        *["--swap-space", "0.5", "--preemption-mode", "swap", "--seed", "7"],
    )
    assert args == EngineArgs(
        model="m",
        dtype="bfloat16",
        max_model_len=32_000,
        max_num_seqs=3,
        max_num_batched_tokens=2048,
        block_size=32,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=9,
        policy="priority",
        enable_chunked_prefill=False,
        long_prefill_token_threshold=1000,
        max_num_partial_prefills=2,
        watermark=0.25,
        scheduler_delay_factor=0.5,
        swap_space=0.5,
        preemption_mode="swap",
        seed=7,
    )


def test_underscores_and_the_long_memory_flag_are_the_same() -> None:
    assert parse("--max_num_seqs=3", "--kv_cache_memory_bytes", "1G") == EngineArgs(
        max_num_seqs=3, kv_cache_memory_bytes=1 << 30
    )


@pytest.mark.parametrize("name", ["num_gpu_blocks_override", "num_device_blocks_override"])
def test_the_number_of_blocks_has_two_names(name: str) -> None:
    args = EngineArgs(**{name: 9})
    assert parse(f"--{name.replace('_', '-')}=9") == args
    assert args.create_engine_config(TinyCheckpoint(100)).cache == CacheConfig(num_gpu_blocks_override=9)


def test_the_two_names_must_agree() -> None:
    both = EngineArgs(num_gpu_blocks_override=9, num_device_blocks_override=9)
    assert both.create_engine_config(TinyCheckpoint(100)).cache.num_gpu_blocks_override == 9
    with pytest.raises(ConfigError, match="the same setting, got 9 and 8; set one of them"):
        EngineArgs(num_gpu_blocks_override=9, num_device_blocks_override=8).create_engine_config(TinyCheckpoint(100))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max-num-seq", "3"], "unknown flag --max-num-seq, did you mean --max-num-seqs?"),
        (["--zzz"], "unknown flag --zzz;"),
        (["--block-size", "x"], "argument --block-size"),
        (["--max-model-len", "x"], "must be a number such as 4096, 32k, 512M or 4GiB, got 'x'"),
        (["--dtype", "int8"], "argument --dtype"),
    ],
)
def test_a_bad_flag_is_one_line_and_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


def test_help_holds_every_flag_and_default() -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser, exclude=("seed",))
    text = " ".join(parser.format_help().split())
    assert "--max-num-seqs SEQS" in text and "(default: 256)" in text
    assert "--kv-cache-memory" in text and "--no-enable-prefix-caching" in text
    assert "--seed" not in text
    assert text.count("(default: on)") == 2  # prefix caching, chunked prefill


@pytest.mark.parametrize(("limit", "asked", "result"), [(100, None, 100), (10**6, None, 8192), (10**6, 32000, 32000)])
def test_max_model_len(limit: int, asked: int | None, result: int) -> None:
    config = EngineArgs(max_model_len=asked).create_engine_config(TinyCheckpoint(limit))
    assert config.scheduler.max_model_len == result


def test_max_model_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 100, the model's own limit, got 101"):
        EngineArgs(max_model_len=101).create_engine_config(TinyCheckpoint(100))


def test_every_value_reaches_the_configuration() -> None:
    args = EngineArgs(
        dtype="float16",
        max_num_seqs=3,
        max_num_batched_tokens=5,
        block_size=8,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=77,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=9,
        policy="priority",
        long_prefill_token_threshold=4,
        max_num_partial_prefills=2,
        watermark=0.25,
        scheduler_delay_factor=0.5,
        swap_space=0.5,
        preemption_mode="swap",
        seed=11,
    )
    config = args.create_engine_config(TinyCheckpoint(100))
    assert (config.dtype, config.seed, config.model_path) == ("float16", 11, Path("tiny.gguf"))
    assert config.model.num_attention_heads == 2
    assert config.scheduler == SchedulerConfig(
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_model_len=100,
        policy="priority",
        long_prefill_token_threshold=4,
        max_num_partial_prefills=2,
        watermark=0.25,
        scheduler_delay_factor=0.5,
        preemption_mode="swap",
    )
    assert config.cache == CacheConfig(
        block_size=8,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=77,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=9,
        swap_space=0.5,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"policy": "sjf"}, "policy must be one of fcfs, priority, got 'sjf'; set --policy"),
        ({"swap_space": -1.0}, "swap_space must be at least 0 GiB, got -1.0; set --swap-space"),
        ({"preemption_mode": "x"}, "preemption_mode must be one of auto, swap, recompute, got 'x'"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0; set --watermark"),
        ({"scheduler_delay_factor": -1.0}, "scheduler_delay_factor must be at least 0, got -1.0"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills must be at least 1, got 0"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 99},
            "max_num_batched_tokens must be at least max_model_len=100 without chunked prefill, got 99",
        ),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 8}, "need chunked prefill, got 8 and 1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineArgs(**arguments).create_engine_config(TinyCheckpoint(100))


def test_parallel_flags_reach_the_configuration() -> None:
    args = parse("-tp", "2", "--pipeline-parallel-size", "3", "-dp", "4", "--distributed-executor-backend", "mp")
    parallel = args.create_engine_config(TinyCheckpoint(64)).parallel
    assert parallel == ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        data_parallel_size=4,
        distributed_executor_backend="mp",
    )
    assert parallel.world_size == 6
    assert EngineArgs().create_engine_config(TinyCheckpoint(64)).parallel == ParallelConfig()


@pytest.mark.parametrize(
    ("flag", "name"),
    [("-tp", "tensor_parallel_size"), ("-pp", "pipeline_parallel_size"), ("-dp", "data_parallel_size")],
)
def test_parallel_sizes_below_one_are_refused(flag: str, name: str) -> None:
    rule = f"{name} must be at least 1, got 0; set --{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rule):
        parse(flag, "0").create_engine_config(TinyCheckpoint(64))


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of uni, mp, ray, external_launcher, got 'mpi'"):
        ParallelConfig(distributed_executor_backend="mpi")


def test_the_checkpoints_own_quantization_may_be_named() -> None:
    checkpoint = TinyCheckpoint(64)
    with pytest.raises(ConfigError, match="stored as floats, got quantization awq, which is read but not made"):
        EngineArgs(model="x", quantization="awq").create_engine_config(checkpoint)
    checkpoint.config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    for quantization in (None, "awq"):
        config = EngineArgs(model="x", quantization=quantization).create_engine_config(checkpoint)
        assert config.quantization is None and config.model.stored_scheme is not None
    assert EngineArgs(model="x", quantization="int8").create_engine_config(checkpoint).quantization == "int8"
    with pytest.raises(ConfigError, match="stored as awq, got quantization gptq"):
        EngineArgs(model="x", quantization="gptq").create_engine_config(checkpoint)
