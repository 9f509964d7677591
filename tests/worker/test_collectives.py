"""Reading what devices exchange off a compiled program's text, and off real programs on eight devices."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.worker.collectives import Collective, bytes_by_kind, find_collectives

_HLO = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (loop: (s32[], f32[64])) -> (s32[], f32[64]) {
  %loop = (s32[], f32[64]{0}) parameter(0)
  %counted = f32[64]{0:T(128)} all-reduce(%loop), replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (s32[], f32[64]{0}) tuple(%counted)
}

ENTRY %main (weight: bf16[8,128], hidden: bf16[64,128]) -> bf16[64,128] {
  %weight = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %hidden = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %copied = bf16[8,128]{1,0} copy(%weight)
  %whole = bf16[16,128]{1,0:T(8,128)(2,1)} all-gather(%copied), replica_groups={{0,1}}, dimensions={0}
  %product = bf16[64,128]{1,0} fusion(%hidden, %whole), kind=kOutput, calls=%add
  %started = (bf16[64,128]{1,0}, bf16[128,128]{1,0}, u32[]) all-gather-start(%product), dimensions={0}
  %finished = bf16[128,128]{1,0} all-gather-done(%started)
  ROOT %out = bf16[64,128]{1,0} all-reduce(%product), channel_id=1, to_apply=%add
}
"""


def test_each_exchange_is_found_with_its_bytes_and_its_origin() -> None:
    assert find_collectives(_HLO, {0}) == [
        Collective("all-reduce", 64 * 4, False),
        Collective("all-gather", 16 * 128 * 2, True),
        Collective("all-gather", 128 * 128 * 2, False),
        Collective("all-reduce", 64 * 128 * 2, False),
    ]
    assert not any(each.is_of_state for each in find_collectives(_HLO, {1})[:2])


def test_they_add_up_by_kind() -> None:
    found = [Collective("all-reduce", 3, False), Collective("all-gather", 5, False), Collective("all-reduce", 4, False)]
    assert bytes_by_kind(found) == {"all-reduce": (2, 7), "all-gather": (1, 5)}


def test_a_weight_that_xla_gathers_is_seen_in_a_real_program() -> None:
    """The weight is cut where the product needs it whole; only its own gathering counts, not that of activations."""
    mesh = Mesh(jax.devices()[:8], ("tensor",))
    rows, whole = NamedSharding(mesh, PartitionSpec("tensor")), NamedSharding(mesh, PartitionSpec())
    weight = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    hidden = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=whole)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows.spec, whole.spec), out_specs=whole.spec, check_vma=False
    )
    def gathering(weight: jax.Array, hidden: jax.Array) -> jax.Array:
        return hidden @ jax.lax.all_gather(weight, "tensor", tiled=True)

    found = find_collectives(jax.jit(gathering).lower(weight, hidden).compile().as_text(), {0})
    assert found == [Collective("all-gather", 64 * 32 * 4, True)]
