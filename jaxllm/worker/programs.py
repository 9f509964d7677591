"""The list of every program that a worker compiles, and the only place that compiles one.

    embed[T] · layers_<kind>[T] · logits[T] · sample[R] · score[R] · edit_logits[R]
    copy_blocks · gather_blocks · scatter_blocks

Where the mesh has several devices, each program is one jax.shard_map: every device runs it on its parts of the
arguments, and the layers say where devices exchange anything. After warm-up a call with any other shape is an error
that names it, never a silent compile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import ForwardBatch, LogitEdits, SamplingBatch
from jaxllm.worker.buckets import num_seqs_at
from jaxllm.worker.step_fn import (
    StepModel,
    StepSampler,
    copy_cache_blocks,
    gather_cache_blocks,
    sampler_for,
    scatter_cache_blocks,
)
from sharding.partition import laid_out_shape, replicated
from sharding.rules import sharding_for

EDITS_PER_ROW = 256  # single logits that one call of edit_logits changes, for each row
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
      mesh: What it runs on; the arguments say how they lie there. None is one device.
      results: How the results lie on a mesh of several devices: PartitionSpec, in a tree that may end before theirs.
    """

    name: str
    size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    mesh: Mesh | None = None
    results: Any = PartitionSpec()

    def lower(self) -> jax.stages.Lowered:
        """Traces for exactly these shapes."""
        return jax.jit(self._on_mesh(), donate_argnums=self.donated).lower(*self.arguments)

    def compile(self) -> jax.stages.Compiled:
        """Compiles for exactly these shapes; reads and fills JAX's compilation cache."""
        return self.lower().compile()

    def _on_mesh(self) -> Callable[..., Any]:
        if self.mesh is None or self.mesh.size == 1:
            return self.function
        # Replication isn't checked: Pallas kernels don't declare it.
        return jax.shard_map(
            self.function, mesh=self.mesh, in_specs=_specs(self.arguments), out_specs=self.results, check_vma=False
        )


def list_programs(model: StepModel, cache: LayerCache, shapes: ProgramShapes, mesh: Mesh) -> list[Program]:
    """Lists every program of a worker, most needed first.

    Args:
      model: The split model; its weights may be jax.ShapeDtypeStruct with shardings.
      cache: One layer's KV cache (all layers' are alike), or jax.ShapeDtypeStruct in its place.
      shapes: The fixed sizes.
      mesh: Of the weights and the cache; step inputs are replicated on it. Its devices need not exist here.
    """
    spec = _Specs(shapes, mesh)
    programs: list[Program] = []
    for size in shapes.ladder:
        programs += _forward_programs(size, model, cache, spec)
    if model.logits_weights:
        for size in shapes.draw_ladder:
            programs += _draw_programs(size, sampler_for(shapes.vocab_size, mesh), spec)
    programs += _block_programs(cache, spec)
    return [replace(program, mesh=mesh) for program in programs]


def _forward_programs(size: int, model: StepModel, cache: LayerCache, spec: "_Specs") -> list[Program]:
    shapes, hidden = spec.shapes, spec.hidden(size)
    programs = []
    if model.embed_weights:
        weights = jax.tree.map(_like, model.embed_weights)
        programs.append(Program("embed", size, model.embed, (weights, spec.ints(size), spec.ints(size))))
    for kind, segment in {segment.kind: segment for segment in model.segments}.items():
        weights, caches = jax.tree.map(_like, (segment.weights, (cache,) * segment.num_layers))
        arguments = (weights, hidden, spec.forward_batch(size), caches)
        name, results = f"layers_{kind}", (PartitionSpec(), _specs(caches))
        programs.append(Program(name, size, model.run_layers[kind], arguments, donated=(1, 3), results=results))
    if model.logits_weights:
        num_draws = num_seqs_at(size, shapes.max_num_draws)
        weights, results = jax.tree.map(_like, model.logits_weights), _specs(spec.logits(num_draws))
        programs.append(Program("logits", size, model.logits, (weights, hidden, spec.ints(num_draws)), results=results))
    return programs


def _draw_programs(size: int, sampler: StepSampler, spec: "_Specs") -> list[Program]:
    logits = spec.logits(size)
    return [
        Program("sample", size, sampler.sample, (logits, spec.sampling_batch(size))),
        Program("score", size, sampler.score, (logits, spec.ints(size))),
        Program("edit_logits", size, sampler.edit_logits, (logits, logits, spec.edits(size)), results=_specs(logits)),
    ]


def _block_programs(cache: LayerCache, spec: "_Specs") -> list[Program]:
    blocks, size, whole = spec.ints(COPY_BATCH), COPY_BATCH, jax.tree.map(_like, cache)
    rows = jax.tree.map(lambda array: _like_rows(array, COPY_BATCH), cache)
    results = _specs(whole)
    return [
        Program("copy_blocks", size, copy_cache_blocks, (whole, blocks, blocks), donated=(0,), results=results),
        Program("gather_blocks", size, gather_cache_blocks, (whole, blocks), results=results),
        Program("scatter_blocks", size, scatter_cache_blocks, (whole, blocks, rows), donated=(0,), results=results),
    ]


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
    """Shapes of the step inputs, which every device holds whole, and of what flows from program to program."""

    def __init__(self, shapes: ProgramShapes, mesh: Mesh) -> None:
        self.shapes, self._mesh = shapes, mesh
        self._replicated = replicated(mesh)

    def array(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self._replicated)

    def hidden(self, size: int) -> jax.ShapeDtypeStruct:
        return self.array((size, self.shapes.hidden_size), self.shapes.dtype)

    def logits(self, size: int) -> jax.ShapeDtypeStruct:
        axes = (None, "vocab")
        shape = laid_out_shape((size, self.shapes.vocab_size), self._mesh, axes)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding_for(self._mesh, axes, shape))

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.array(shape, np.int32)

    def forward_batch(self, size: int) -> ForwardBatch:
        num_seqs = num_seqs_at(size, self.shapes.max_num_seqs)
        return ForwardBatch(
            token_ids=self.ints(size),
            positions=self.ints(size),
            slots=self.ints(size),
            block_tables=self.ints(num_seqs, self.shapes.blocks_per_seq),
            seq_lens=self.ints(num_seqs),
            query_start_loc=self.ints(num_seqs + 1),
        )

    def edits(self, size: int) -> LogitEdits:
        num_edits = size * EDITS_PER_ROW
        floats = self.array((num_edits,), np.float32)
        return LogitEdits(
            rows=self.ints(num_edits),
            token_ids=self.ints(num_edits),
            biases=floats,
            divisors=floats,
            penalties=floats,
            is_restricted=self.array((size,), np.bool_),
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


def _specs(tree: Any) -> Any:
    """Returns how arrays lie on their mesh; of those that lie on one device without a mesh, PartitionSpec()."""
    return jax.tree.map(_spec, tree)


def _spec(array: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
    return array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()
