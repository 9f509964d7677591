"""Compiles a step of whole models for slices of TPUs that aren't here, and prints what their devices exchange.

usage: scripts/aot_models [--models NAMES] [--targets NAMES] [--layers N]

A step is the programs that a worker runs: embedding, all layers, logits, sampling. No weights are made. A model that
doesn't fit in bfloat16 is compiled in int8, and the KV cache is as large as fits. Exit status: 0, 1 if a program
doesn't compile, or one gathers a weight or the KV cache, or a model fits in no form.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.worker.collectives import Collective, bytes_by_kind, find_collectives
from jaxllm.worker.memory_profile import num_device_blocks
from jaxllm.worker.plan import StagePlan, plan_stages
from jaxllm.worker.programs import Program
from sharding.mesh import make_mesh

_GIB = 1 << 30
_NUM_SEQS, _MAX_MODEL_LEN, _PROMPT, _BLOCK_SIZE = 64, 4096, 2048, 128
_BLOCKS_PER_SEQ = _MAX_MODEL_LEN // _BLOCK_SIZE
_FORMS = (None, "int8")  # of the weights, a name in quantization.SCHEMES or bfloat16: the first that fits
_STEPS = {"decode-64": _NUM_SEQS, "prefill-2048": _PROMPT}
_STATE_ARGUMENTS = {"embed": (0,), "layers_0": (0, 3), "logits": (0,), "sample": ()}


class Target(NamedTuple):
    """A slice of TPUs."""

    topology: str
    hbm_bytes: int  # of a device; tpu7x has two a chip


TARGETS = {
    "v5e-2x4": Target("v5e:2x4", 16 * _GIB),
    "v6e-2x4": Target("v6e:2x4", 32 * _GIB),
    "tpu7x-2x2x1": Target("tpu7x:2x2x1", 96 * _GIB),
}


def _model(architecture: str, *sizes: int, rope_theta: float) -> ModelConfig:
    vocab, hidden, intermediate, layers, heads, kv_heads = sizes
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=_MAX_MODEL_LEN,
        rope_theta=rope_theta,
    )


MODELS = {
    "Llama-3-8B": _model("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, rope_theta=5e5),
    "Llama-3-70B": _model("LlamaForCausalLM", 128256, 8192, 28672, 80, 64, 8, rope_theta=5e5),
    "Qwen3-32B": _model("Qwen3ForCausalLM", 151936, 5120, 25600, 64, 64, 8, rope_theta=1e6),
}


class Compiled(NamedTuple):
    """What came of one program."""

    name: str
    seconds: float
    argument_bytes: int  # on one device
    temporary_bytes: int
    collectives: list[Collective]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/aot_models", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAMES", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--targets", default=",".join(TARGETS), metavar="NAMES", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--layers", type=int, help="compile only so many layers, as CI does; the output says so")
    options = parser.parse_args(arguments)
    models, targets = options.models.split(","), options.targets.split(",")
    unknown = [*(set(models) - set(MODELS)), *(set(targets) - set(TARGETS))]
    if unknown:
        parser.error(f"must be some of {', '.join((*MODELS, *TARGETS))}, got {unknown[0]!r}")
    is_good = True
    for model in models:
        for target in targets:
            is_good &= _report_model(model, target, options.layers)
    return 0 if is_good else 1


def plan(model: ModelConfig, mesh: Mesh, quantization: str | None, num_seqs: int) -> StagePlan:
    """Returns what a worker on all devices of the mesh would hold and run, tensor parallel.

    Args:
      model: Any.
      mesh: Its devices need not exist here.
      quantization: A name in quantization.SCHEMES, or None for bfloat16.
      num_seqs: Sequences of _MAX_MODEL_LEN tokens that the KV cache holds.
    """
    scheduler = SchedulerConfig(max_num_seqs=_NUM_SEQS, max_num_batched_tokens=_PROMPT, max_model_len=_MAX_MODEL_LEN)
    config = EngineConfig(
        model=model,
        model_path=Path("none"),
        quantization=quantization,
        cache=CacheConfig(block_size=_BLOCK_SIZE),
        scheduler=scheduler,
    )
    (stage,) = plan_stages(config, mesh, "tpu", jnp.dtype(jnp.bfloat16), 1 + num_seqs * _BLOCKS_PER_SEQ)
    return stage


def weight_bytes(stage: StagePlan) -> int:
    """Returns what one device holds of the weights."""
    return sum(_shard_bytes(array) for array in jax.tree.leaves(nnx.state(stage.model)))


def num_seqs_that_fit(stage: StagePlan, hbm_bytes: int) -> int:
    """Returns how many sequences of _MAX_MODEL_LEN tokens a device holds beside its weights, at most _NUM_SEQS.

    A worker also subtracts what a step needs, which takes the compiler to know; here it comes out of the share that
    gpu_memory_utilization leaves, and is printed.
    """
    layer_bytes = sum(_shard_bytes(array) // array.shape[0] for array in stage.cache)
    free_bytes = _usable_bytes(hbm_bytes) - weight_bytes(stage)
    num_blocks = num_device_blocks(free_bytes, layer_bytes * len(stage.part.layers))
    return min(_NUM_SEQS, max(num_blocks - 1, 0) // _BLOCKS_PER_SEQ)


def _report_model(name: str, target_name: str, num_layers: int | None) -> bool:
    """Compiles both steps in the first form that fits and prints them; says whether all is as it should be."""
    model, target = MODELS[name], TARGETS[target_name]
    if num_layers is not None:
        model = replace(model, num_hidden_layers=num_layers)
    mesh = make_mesh(topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices)
    for form in _FORMS:
        stage = plan(model, mesh, form, _NUM_SEQS)
        num_seqs = num_seqs_that_fit(stage, target.hbm_bytes)
        if num_seqs:
            break
        print(
            f"{name} {target_name} doesn't fit in {form or 'bfloat16'}: weights {weight_bytes(stage) / _GIB:.2f} GiB a "
            f"device, of {target.hbm_bytes // _GIB} GiB {_usable_bytes(target.hbm_bytes) / _GIB:.2f} are for them and "
            "the KV cache"
        )
    else:
        return False
    if num_seqs < _NUM_SEQS:
        stage = plan(model, mesh, form, num_seqs)
    ending = f", {num_layers} layers of it" if num_layers is not None else ""
    if num_seqs < _NUM_SEQS:
        ending += f", KV cache of {num_seqs} sequences of {_MAX_MODEL_LEN} tokens instead of {_NUM_SEQS}"
    compiled: dict[tuple[str, int], Compiled] = {}  # both steps draw with the same program
    is_good = True
    for step, size in _STEPS.items():
        print(f"{name}{f' {form}' if form else ''} {step} {target_name}{ending}", flush=True)
        is_good &= _report_step(stage, size, target, compiled)
    return is_good


def _report_step(stage: StagePlan, size: int, target: Target, compiled: dict[tuple[str, int], Compiled]) -> bool:
    """Prints the programs of one step and compiles those that aren't yet; says whether all is as it should be."""
    collectives: list[Collective] = []
    is_good = True
    for program in step_programs(stage, size):
        try:
            key = program.name, program.size
            done = compiled[key] = compiled.get(key) or compile_program(program, stage)
        except Exception as error:  # what the compiler refuses is the row's answer
            print(
                f"  {program.name:9} not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            )
            is_good = False
            continue
        held = (done.argument_bytes + done.temporary_bytes) / target.hbm_bytes
        print(
            f"  {done.name:9} {done.seconds:6.1f} s  arguments {done.argument_bytes / _GIB:6.2f} GiB, temporaries "
            f"{done.temporary_bytes / _GIB:5.2f} GiB a device: {held:4.0%} of {target.hbm_bytes // _GIB} GiB",
            flush=True,
        )
        collectives += done.collectives
    for kind, (count, num_bytes) in bytes_by_kind(collectives).items():
        print(f"  {kind:18} {count:4}  {num_bytes / 1e6:9.3f} MB a step")
    gathered = [each for each in collectives if is_gathered_state(each, stage)]
    for each in gathered:
        print(f"  gathers a weight or the KV cache: {each.num_bytes} bytes")
    return is_good and not gathered


def is_gathered_state(each: Collective, stage: StagePlan) -> bool:
    """Whether this gathers weights or KV cache: made of nothing else, or as large as a layer's cache on one device."""
    cache_bytes = sum(_shard_bytes(array) for array in stage.cache)
    return each.kind == "all-gather" and bool(each.is_of_state or each.num_bytes >= cache_bytes)


def step_programs(stage: StagePlan, size: int) -> list[Program]:
    """Returns the programs that a step of `size` tokens runs."""
    draws = min(size, _NUM_SEQS)
    sizes = {"embed": size, "layers_0": size, "logits": size, "sample": draws}
    return [program for program in stage.programs if sizes.get(program.name) == program.size]


def compile_program(program: Program, stage: StagePlan) -> Compiled:
    """Compiles for the stage's devices. What JAX, Mosaic or XLA raise goes through."""
    start = time.perf_counter()
    with jax.sharding.use_abstract_mesh(stage.mesh.abstract_mesh):  # tells Pallas which chip it is for
        compiled = program.compile()
    seconds = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and hlo is not None
    return Compiled(
        program.name,
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        find_collectives(hlo, _state_parameters(program)),
    )


def _state_parameters(program: Program) -> set[int]:
    """Returns the numbers of the parameters that are weights or KV cache: arguments flattened."""
    sizes = [len(jax.tree.leaves(argument)) for argument in program.arguments]
    return {sum(sizes[:place]) + leaf for place in _STATE_ARGUMENTS[program.name] for leaf in range(sizes[place])}


def _usable_bytes(hbm_bytes: int) -> int:
    return int(CacheConfig.gpu_memory_utilization * hbm_bytes)


def _shard_bytes(array: jax.Array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape)) * jnp.dtype(array.dtype).itemsize


if __name__ == "__main__":
    sys.exit(main())
