"""StageExchange: takes hidden states from stage to stage and the last stage's results to everybody.

In one process those are copies between devices, and results are simply read. Where stages belong to several processes,
they are programs that all of them run, compiled at start as the others are.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.sampler import ScoredTokens
from jaxllm.worker.programs import CompiledPrograms, Program, ProgramShapes
from jaxllm.worker.step_fn import NUM_TOP
from sharding.exchange import (
    BY_STAGE,
    add_up_stages,
    hand_on,
    neighbours,
    of_stage,
    spans_processes,
    stacked,
    stacked_spec,
)
from sharding.mesh import is_mine, stage_meshes
from sharding.partition import fetch, replicated


class StageExchange:
    """What goes between the stages of a mesh.

    Args:
      mesh: Of all stages.
      shapes: What fixes the shapes of hidden states and results.
    """

    def __init__(self, mesh: Mesh, shapes: ProgramShapes) -> None:
        self._mesh, self._shapes, self._stages = mesh, shapes, stage_meshes(mesh)
        self._is_split = spans_processes(mesh) and len(self._stages) > 1
        self._programs = CompiledPrograms({})

    def list_programs(self) -> list[Program]:
        """Lists the programs in which this process takes part."""
        if not self._is_split:
            return []
        programs = []
        for index in range(len(self._stages) - 1):
            pair = neighbours(self._mesh, index)
            if is_mine(pair):
                for size in self._shapes.ladder:
                    arguments = (self._hidden_spec(index, size),)
                    programs.append(Program(f"hand_on_{index}", size, hand_on, arguments, (), pair, BY_STAGE))
        for size in self._shapes.draw_ladder:
            for name, spec in (("share_tokens", self._tokens_spec(size)), ("share_scores", self._scores_spec(size))):
                programs.append(Program(name, size, add_up_stages, (spec,), (), self._mesh, PartitionSpec()))
        return programs

    def use(self, programs: CompiledPrograms) -> None:
        """Takes what list_programs listed, compiled."""
        self._programs = programs

    def hand_on(self, index: int, size: int, hidden: jax.Array | None) -> jax.Array | None:
        """Takes hidden: [T, M] from stage `index` to the next. None stands for what this process has no part of."""
        if not self._is_split:
            return jax.device_put(hidden, replicated(self._stages[index + 1]))
        if not is_mine(neighbours(self._mesh, index)):
            return None
        moved = self._programs(f"hand_on_{index}", size, stacked(hidden, self._hidden_spec(index, size)))
        return of_stage(moved, self._stages[index + 1]) if is_mine(self._stages[index + 1]) else None

    def tokens(self, size: int, token_ids: jax.Array | None) -> np.ndarray:
        """Waits for the last stage's token_ids: [R] and returns them, in every process."""
        tokens: np.ndarray = self._share("share_tokens", size, token_ids, self._tokens_spec(size))
        return tokens

    def scores(self, size: int, scores: ScoredTokens | None) -> ScoredTokens:
        """Waits for the last stage's scores of R tokens and returns them, as numpy arrays, in every process."""
        shared: ScoredTokens = self._share("share_scores", size, scores, self._scores_spec(size))
        return shared

    def _share(self, name: str, size: int, tree: Any, specs: Any) -> Any:
        if not self._is_split:
            return fetch(tree)
        mine = jax.tree.map(lambda _: None, specs) if tree is None else tree
        leaves = jax.tree.leaves(mine, is_leaf=lambda leaf: leaf is None)
        stacks = [stacked(leaf, spec) for leaf, spec in zip(leaves, jax.tree.leaves(specs), strict=True)]
        return fetch(self._programs(name, size, jax.tree.unflatten(jax.tree.structure(specs), stacks)))

    def _hidden_spec(self, index: int, size: int) -> jax.ShapeDtypeStruct:
        return stacked_spec((size, self._shapes.hidden_size), self._shapes.dtype, neighbours(self._mesh, index))

    def _tokens_spec(self, size: int) -> jax.ShapeDtypeStruct:
        return self._spec((size,), np.int32)

    def _scores_spec(self, size: int) -> Any:
        top = (size, min(NUM_TOP, self._shapes.vocab_size))
        columns: list[Any] = [self._spec((size,), np.float32), self._spec((size,), np.int32)]
        return ScoredTokens(*columns, *[self._spec(top, dtype) for dtype in (np.int32, np.float32)])

    def _spec(self, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        return stacked_spec(shape, dtype, self._mesh)


def agree_on_min(values: Sequence[int], mesh: Mesh) -> list[int]:
    """Returns the least of each value over the mesh's processes, which all call this."""
    if not spans_processes(mesh):
        return list(values)
    row = np.array([values], np.int32)  # [1, n]
    axes = ("stage", "tensor")
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    rows = jax.make_array_from_single_device_arrays(
        (mesh.size, len(values)), sharding, [jax.device_put(row, device) for device in mesh.local_devices]
    )
    least = jax.shard_map(
        lambda mine: jax.lax.pmin(mine[0], axes),
        mesh=mesh,
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    agreed: list[int] = fetch(jax.jit(least)(rows)).tolist()
    return agreed
