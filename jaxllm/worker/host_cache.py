"""HostCache: the KV blocks of swapped-out sequences in host memory. Knows blocks by id, no sequence.

Blocks stay in the batches in which they left the device: groups come and go whole, so that a batch mostly goes
back as one. Nothing is allocated before something is swapped out.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxllm.layers.attention import LayerCache
from jaxllm.worker.programs import COPY_BATCH
from sharding.partition import fetch_shards, put_shards

_PINNED = "pinned_host"


class _Place(NamedTuple):
    """Where a block's rows lie."""

    batch: tuple[LayerCache, ...]  # one a layer, [C, ...] if pinned, else as many rows as there are blocks
    row: int


class HostCache:
    """Every layer's keys and values, by host block id. Each process keeps those of its own devices.

    Args:
      sharding: Of the device's KV cache.
      is_pinned: Whether to use memory that the device copies to and from by itself, while it computes. Without
        such memory, and on CPU, rows are numpy arrays.
    """

    def __init__(self, sharding: NamedSharding, is_pinned: bool) -> None:
        self._sharding = sharding
        device = sharding.mesh.local_devices[0]
        kinds = {memory.kind for memory in device.addressable_memories()}
        self._pinned = sharding.with_memory_kind(_PINNED) if is_pinned and _PINNED in kinds else None
        self._places: dict[int, _Place] = {}

    def store(self, host_ids: Sequence[int], rows: Sequence[LayerCache]) -> None:
        """Keeps rows 0..len(host_ids) of each layer's [C, ...] as those blocks, whatever they held before."""
        if self._pinned is not None:
            batch = tuple(jax.device_put(list(rows), self._pinned))
        else:
            batch = tuple(jax.tree.map(lambda array: np.array(fetch_shards(array)[: len(host_ids)]), list(rows)))
        for row, host_id in enumerate(host_ids):
            self._places[host_id] = _Place(batch, row)

    def take(self, blocks: Sequence[tuple[int, int]]) -> Iterator[tuple[np.ndarray, tuple[LayerCache, ...]]]:
        """Gives up (host, device) blocks, batch after batch.

        Yields:
          Destinations [C] int32, 0 for rows that stay, and each layer's rows on the device, [C, ...].
        """
        batches: dict[int, tuple[np.ndarray, tuple[LayerCache, ...]]] = {}
        for host_id, device_id in blocks:
            place = self._places.pop(host_id)
            destinations, _ = batches.setdefault(id(place.batch), (np.zeros(COPY_BATCH, np.int32), place.batch))
            destinations[place.row] = device_id
        for destinations, batch in batches.values():
            if self._pinned is not None:
                yield destinations, tuple(jax.device_put(list(batch), self._sharding))
            else:
                yield destinations, tuple(put_shards(jax.tree.map(_pad, list(batch)), self._sharding))


def _pad(rows: np.ndarray) -> np.ndarray:
    """Returns rows: [n, ...] as [C, ...]."""
    padded = np.zeros((COPY_BATCH, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
