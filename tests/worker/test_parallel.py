"""What is refused or said before a model is loaded on several devices, and its plan without weights."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from jaxllm.exceptions import ConfigError
from jaxllm.models.causal_lm import model_parts
from jaxllm.worker.padding_cost import padding_costs
from jaxllm.worker.plan import plan_stages
from jaxllm.worker.worker import Worker
from sharding.mesh import make_mesh
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder


def _model(**sizes: int) -> ModelConfig:
    defaults = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "max_position_embeddings": 64,
    }
    return ModelConfig(architecture="LlamaForCausalLM", tie_word_embeddings=True, **{**defaults, **sizes})


def _config(**parallel: int) -> EngineConfig:
    return EngineConfig(
        model=_model(),
        model_path=Path("no-such-model"),
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32),
        parallel=ParallelConfig(**parallel),
    )


def test_more_devices_than_there_are_is_one_line_before_anything_loads() -> None:
    text = "needs 128 devices, there are 1; set --tensor-parallel-size, .*or JAX_NUM_CPU_DEVICES=128"
    with pytest.raises(ConfigError, match=text):
        Worker(_config(tensor_parallel_size=64, pipeline_parallel_size=2), jax.devices()[:1]).initialize()
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be at most 3, the model's layers, got 4"):
        Worker(_config(pipeline_parallel_size=4), [jax.devices()[0]] * 4).initialize()


def test_padding_says_what_it_costs() -> None:
    assert padding_costs(_model(), 1) == padding_costs(_model(vocab_size=33), 3)[:0] == []
    assert padding_costs(_model(vocab_size=33), 2) == [
        "heads: 9 query and 3 KV heads padded with zero heads to 12 and 4 for 2 devices, 33.3 % more work in attention "
        "and 33.3 % more KV cache",
        "vocabulary: 33 padded with zeros to 34 for 2 devices, 3.03 % more weights",
    ]
    assert padding_costs(_model(num_attention_heads=4, num_key_value_heads=2), 4) == [
        "KV cache: 2 KV heads for 4 devices; 2 devices have a copy of each, 100 % more KV cache"
    ]


def test_layers_are_dealt_to_stages_and_none_is_lost() -> None:
    for num_layers in range(1, 9):
        for num_stages in range(1, num_layers + 1):
            parts = model_parts(num_layers, num_stages)
            assert [index for part in parts for index in part.layers] == list(range(num_layers))
            lens = [len(part.layers) for part in parts]
            assert max(lens) - min(lens) <= 1 and lens[-1] == min(lens)
            assert [part.has_hidden for part in parts] == [True] + [False] * (num_stages - 1)
            assert [part.has_logits for part in parts] == [False] * (num_stages - 1) + [True]


def test_a_plan_needs_no_weights_and_holds_no_layer_twice() -> None:
    mesh = make_mesh([jax.devices()[0]] * 4, num_stages=2)
    first, last = plan_stages(_config(), mesh, "cpu", jnp.dtype(jnp.float32), num_blocks=9)
    assert (len(first.model.layers), len(last.model.layers)) == (2, 1)
    qkv = first.model.layers[0].attention.qkv.weight.get_value()
    assert qkv.shape == (2 * (6 + 2 + 2) * 4, 8) and qkv.sharding.spec == PartitionSpec("tensor", None)
    assert [array.shape for array in first.cache] == [(9, 4, 4, 4)] * 2
    names = {program.name for program in first.programs}, {program.name for program in last.programs}
    blocks = {"copy_blocks", "gather_blocks", "scatter_blocks"}
    assert names == ({"embed", "layers_0", *blocks}, {"layers_0", "logits", "sample", "score", "edit_logits", *blocks})
    assert isinstance(last.model.frame.embed.weight.get_value(), jax.ShapeDtypeStruct)


def test_the_plan_is_printed(tmp_path: Path) -> None:
    model = tiny_llama(num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=2)
    folder = write_tiny_folder(tmp_path, model)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    flags = f"--model {folder} -tp 2 -pp 2 --max-model-len 32"
    argv = [sys.executable, "-m", "jaxllm.plan", *flags.split()]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mesh: data 1, expert 1, tensor 2, stage 2, of cpu devices"
    assert lines[1].startswith("heads: 6 query and 3 KV heads padded with zero heads to 8 and 4 for 2 devices")
    assert [line.split(";")[0] for line in lines if line.startswith("stage")] == [
        "stage 0: layers 0 to 0 on devices 0, 1",
        "stage 1: layers 1 to 1 on devices 2, 3",
    ]
    assert [line for line in lines if "KV cache x" in line][:2] == [
        "  KV cache x 1: float32 [N, 4, 16, 64], cut over (None, tensor, None, None), [N, 2, 16, 64] on each device",
        "  KV cache x 1: float32 [N, 4, 64, 16], cut over (None, tensor, None, None), [N, 2, 64, 16] on each device",
    ]
