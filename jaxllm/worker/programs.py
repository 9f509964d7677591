"""The list of every program that a worker compiles, and the only place that compiles one.

    embed[T] · layers_<kind>[T] · logits[T] · sample[R] · score[R] · add_bias[R]
    copy_blocks · gather_blocks · scatter_blocks

After warm-up a call with any other shape is an error that names it, never a silent compile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import ForwardBatch, SamplingBatch
from jaxllm.worker.buckets import num_seqs_at
from jaxllm.worker.step_fn import (
    StepModel,
    add_bias,
    copy_cache_blocks,
    gather_cache_blocks,
    sample,
    scatter_cache_blocks,
    score,
)

BIAS_BATCH = 512  # single logits that one call of add_bias changes
COPY_BATCH = 16  # blocks that one call of copy_blocks, gather_blocks or scatter_blocks moves


@dataclass(frozen=True, kw_only=True)
class ProgramShapes:
    """What fixes the shape of every program.

    Attributes:
      ladder: Padded token counts T.
      max_num_seqs: Most sequences of a step.
      max_num_draws: Most draws of a round.
      blocks_per_seq: Width B of the block tables.
      vocab_size: Width V of the logits.
      hidden_size: M.
      dtype: Of hidden states.
    """

    ladder: tuple[int, ...]
    max_num_seqs: int
    max_num_draws: int
    blocks_per_seq: int
    vocab_size: int
    hidden_size: int
    dtype: jnp.dtype

    @property
    def draw_ladder(self) -> tuple[int, ...]:
        """Padded draw counts R."""
        return tuple(sorted({num_seqs_at(rung, self.max_num_draws) for rung in self.ladder}))


@dataclass(frozen=True)
class Program:
    """One function at one shape.

    Attributes:
      name: Of the function.
      size: Its rung, T or R.
      function: Pure function of arrays.
      arguments: jax.ShapeDtypeStruct or arrays to compile it for.
      donated: Positions of the arguments whose memory the result takes over.
    """

    name: str
    size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()

    def compile(self) -> jax.stages.Compiled:
        """Compiles for exactly these shapes; reads and fills JAX's compilation cache."""
        return jax.jit(self.function, donate_argnums=self.donated).lower(*self.arguments).compile()


def list_programs(model: StepModel, cache: LayerCache, shapes: ProgramShapes, mesh: Mesh) -> list[Program]:
    """Lists every program of a worker, most needed first.

    Args:
      model: The split model.
      cache: One layer's KV cache (all layers' are alike), or jax.ShapeDtypeStruct in its place.
      shapes: The fixed sizes.
      mesh: Where step inputs are replicated.
    """
    spec = _Specs(shapes, NamedSharding(mesh, PartitionSpec()))
    cache_spec = jax.tree.map(_like, cache)
    frame = jax.tree.map(_like, model.frame)
    by_kind = {segment.kind: segment for segment in model.segments}
    programs = []
    for size in shapes.ladder:
        hidden = spec.array((size, shapes.hidden_size), shapes.dtype)
        num_draws = num_seqs_at(size, shapes.max_num_draws)
        programs.append(Program("embed", size, model.embed, (frame, spec.ints(size), spec.ints(size))))
        for kind, segment in by_kind.items():
            arguments = (
                jax.tree.map(_like, segment.weights),
                hidden,
                spec.forward_batch(size),
                (cache_spec,) * segment.num_layers,
            )
            programs.append(Program(f"layers_{kind}", size, model.run_layers[kind], arguments, donated=(1, 3)))
        programs.append(Program("logits", size, model.logits, (frame, hidden, spec.ints(num_draws))))
    for size in shapes.draw_ladder:
        logits = spec.array((size, shapes.vocab_size), jnp.float32)
        programs.append(Program("sample", size, sample, (logits, spec.sampling_batch(size))))
        programs.append(Program("score", size, score, (logits, spec.ints(size))))
        values = spec.array((BIAS_BATCH,), np.float32)
        programs.append(
            Program("add_bias", size, add_bias, (logits, spec.ints(BIAS_BATCH), spec.ints(BIAS_BATCH), values))
        )
    blocks = spec.ints(COPY_BATCH)
    programs.append(Program("copy_blocks", COPY_BATCH, copy_cache_blocks, (cache_spec, blocks, blocks), donated=(0,)))
    programs.append(Program("gather_blocks", COPY_BATCH, gather_cache_blocks, (cache_spec, blocks)))
    rows = jax.tree.map(lambda array: _like_rows(array, COPY_BATCH), cache)
    scattered = (cache_spec, blocks, rows)
    programs.append(Program("scatter_blocks", COPY_BATCH, scatter_cache_blocks, scattered, donated=(0,)))
    return programs


class CompiledPrograms:
    """The compiled programs by name and rung."""

    def __init__(self, compiled: Mapping[tuple[str, int], Callable[..., Any]]) -> None:
        self._compiled = compiled

    def __call__(self, name: str, size: int, *arguments: Any) -> Any:
        """Runs a program.

        Raises:
          RuntimeError: It isn't among the programs compiled at start.
        """
        program = self._compiled.get((name, size))
        if program is None:
            sizes = [rung for other, rung in self._compiled if other == name]
            raise RuntimeError(f"program {name} was compiled for sizes {sizes}, not for {size}")
        return program(*arguments)


class _Specs:
    """Shapes of the step inputs, which every device holds whole."""

    def __init__(self, shapes: ProgramShapes, sharding: NamedSharding) -> None:
        self._shapes, self._sharding = shapes, sharding

    def array(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self._sharding)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.array(shape, np.int32)

    def forward_batch(self, size: int) -> ForwardBatch:
        num_seqs = num_seqs_at(size, self._shapes.max_num_seqs)
        return ForwardBatch(
            token_ids=self.ints(size),
            positions=self.ints(size),
            slots=self.ints(size),
            block_tables=self.ints(num_seqs, self._shapes.blocks_per_seq),
            seq_lens=self.ints(num_seqs),
            query_start_loc=self.ints(num_seqs + 1),
        )

    def sampling_batch(self, size: int) -> SamplingBatch:
        floats = self.array((size,), np.float32)
        return SamplingBatch(
            logits_indices=self.ints(size),
            temperature=floats,
            top_k=self.ints(size),
            top_p=floats,
            min_p=floats,
            seeds=self.array((size, 2), np.uint32),
            positions=self.ints(size),
        )


def _like_rows(array: jax.Array, num_rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_rows, *array.shape[1:]), array.dtype, sharding=array.sharding)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
