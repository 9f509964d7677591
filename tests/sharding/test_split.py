"""Heads and other units over shards, against rules that hold for every number of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.split import Even, Groups, HeadSplit, KVHeads, QueryHeads, UndividedError, element_order


def test_smollm2_on_two_devices_gets_12_and_4_heads() -> None:
    split = HeadSplit(num_heads=9, num_kv_heads=3, num_shards=2)
    assert (split.heads_per_shard, split.kv_heads_per_shard, split.num_copies) == (6, 2, 1)
    assert split.query_heads.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, -1, -1, -1]]
    assert split.kv_heads.tolist() == [[0, 1], [2, -1]]


def test_more_devices_than_key_value_heads_copy_them() -> None:
    split = HeadSplit(num_heads=9, num_kv_heads=3, num_shards=8)
    assert split.kv_heads.tolist() == [[0], [0], [1], [1], [2], [2], [-1], [-1]]
    assert split.query_heads.tolist() == [[0, 1], [2, -1], [3, 4], [5, -1], [6, 7], [8, -1], [-1, -1], [-1, -1]]


def test_a_fused_projection_is_dealt_part_by_part() -> None:
    parts = (QueryHeads(2, 1, 2), KVHeads(2, 1, 2), KVHeads(2, 1, 2))
    # Elements 0 to 3 are two query heads, 4 and 5 the key, 6 and 7 the value, which both shards need.
    assert element_order(parts, 2).tolist() == [0, 1, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7]
    assert element_order((Even(3), Even(3)), 2).tolist() == [0, 1, 3, 4, 2, -1, 5, -1]


@given(group=st.integers(1, 9), num_kv_heads=st.integers(1, 9), num_shards=st.integers(1, 17))
def test_every_query_head_meets_its_own_key_value_head(group: int, num_kv_heads: int, num_shards: int) -> None:
    split = HeadSplit(group * num_kv_heads, num_kv_heads, num_shards)
    queries, keys = split.query_heads, split.kv_heads
    assert queries.shape == (num_shards, split.heads_per_shard) and keys.shape == (num_shards, split.kv_heads_per_shard)
    assert sorted(queries[queries >= 0].tolist()) == list(range(group * num_kv_heads))
    share = split.heads_per_shard // split.kv_heads_per_shard  # how attention pairs them on a shard
    pairs = np.repeat(keys, share, axis=1)
    assert ((queries < 0) | (queries // group == pairs)).all()
    counts = np.bincount(keys[keys >= 0], minlength=num_kv_heads)
    assert (counts == split.num_copies).all()


@given(count=st.integers(1, 40), width=st.integers(1, 3), num_shards=st.integers(1, 9))
def test_even_units_stay_in_order_and_whole(count: int, width: int, num_shards: int) -> None:
    order = element_order((Even(count, width),), num_shards)
    assert len(order) % num_shards == 0 and order[order >= 0].tolist() == list(range(count * width))
    assert len(order) - count * width < num_shards * width


def test_scales_go_where_their_inputs_go() -> None:
    heads = QueryHeads(num_heads=6, num_kv_heads=2, width=4)  # on four devices: 0 1 | 2 - | 3 4 | 5 -
    assert Groups(heads, 2).units(4).tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [6, 7, 8, 9], [10, 11, -1, -1]]
    assert Groups(heads, 4).units(3).tolist() == [[0, 1, 2], [3, 4, 5], [-1, -1, -1]]
    with pytest.raises(UndividedError, match="groups of 8 would be cut between devices"):
        Groups(heads, 8).units(4)
    with pytest.raises(UndividedError, match="groups of 16 don't divide the 24 that each device has"):
        Groups(Even(48), 16).units(2)


@given(
    part=st.builds(Even, st.integers(1, 12), st.integers(1, 6))
    | st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)).map(
        lambda sizes: QueryHeads(sizes[0] * sizes[1], sizes[1], sizes[2])
    ),
    size=st.integers(1, 12),
    num_shards=st.integers(1, 9),
)
def test_every_input_finds_its_scale_on_its_device(part: Even | QueryHeads, size: int, num_shards: int) -> None:
    num_inputs = part.count * part.width
    if num_inputs % size:
        return
    try:
        scales = element_order([Groups(part, size)], num_shards)
    except UndividedError:
        return
    inputs = element_order([part], num_shards)
    by_input = np.repeat(scales, size)
    assert len(inputs) == len(by_input)
    assert (np.where(inputs < 0, -1, inputs // size) == by_input).all()
