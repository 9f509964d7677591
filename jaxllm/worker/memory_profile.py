"""How many KV cache blocks the memory holds. Arithmetic of bytes alone: knows no array, device or program object.

    KV budget = utilization x device memory - weights - activations

Activations are what a step needs besides weights and KV cache. They are asked of the compiler, not tried out: the
worker compiles the programs of the largest step for a small KV cache and adds up what `memory_analysis()` reports.
Layers update the cache in place, so their temporaries don't grow with the number of blocks (tests/worker check it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.exceptions import ConfigError

_GIB = 1 << 30


class ProgramMemory(NamedTuple):
    """One compiled program's needs besides its arguments, in bytes."""

    temp_bytes: int  # while it runs
    result_bytes: int  # new arrays, without those that take over a donated argument


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """The terms of the KV budget of one device, in bytes. `utilization` is a share of total_bytes."""

    total_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache, at least 0."""
        return max(0, int(self.total_bytes * self.utilization - self.weight_bytes - self.activation_bytes))

    def __str__(self) -> str:
        return (
            f"{_gib(self.total_bytes)} of device memory x gpu_memory_utilization {self.utilization:g} - weights "
            f"{_gib(self.weight_bytes)} - activations {_gib(self.activation_bytes)} = {_gib(self.kv_bytes)} for KV"
        )


def dummy_batch_lens(max_num_batched_tokens: int, max_num_seqs: int) -> list[int]:
    """Returns the lengths of the sequences of the largest step, as even as can be, the longer ones first.

    >>> dummy_batch_lens(10, 3), dummy_batch_lens(11, 3)
    ([4, 3, 3], [4, 4, 3])
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each sequence of a step needs a token
    quotient, remainder = divmod(max_num_batched_tokens, num_seqs)
    return [quotient + 1] * remainder + [quotient] * (num_seqs - remainder)


def num_device_blocks(kv_bytes: int, bytes_per_block: int) -> int:
    """Returns how many blocks a KV budget holds, the null block included."""
    return max(0, kv_bytes // bytes_per_block)


def num_host_blocks(swap_space_bytes: int, bytes_per_block: int) -> int:
    """Returns how many swapped-out blocks the host's swap space holds."""
    return max(0, swap_space_bytes // bytes_per_block)


def activation_bytes(programs: Sequence[ProgramMemory]) -> int:
    """Returns a bound on what the chain of one step's programs needs at any moment.

    Programs run one after the other, so their temporaries don't add up; their results may all be alive at the end.
    """
    return max(program.temp_bytes for program in programs) + sum(program.result_bytes for program in programs)


def check_fits(profile: MemoryProfile, bytes_per_block: int, block_size: int, max_model_len: int) -> None:
    """Checks that one sequence of max_model_len fits in the KV cache, beside the null block.

    Raises:
      ConfigError: It doesn't. The message names each term and the largest max_model_len that fits.
    """
    longest = max(0, num_device_blocks(profile.kv_bytes, bytes_per_block) - 1) * block_size
    if max_model_len <= longest:
        return
    way_out = f"set --max-model-len {longest} or less, or raise" if longest else "nothing fits: raise"
    raise ConfigError(
        f"the KV cache must hold one sequence of max_model_len={max_model_len} tokens, which takes "
        f"{_gib((-(-max_model_len // block_size) + 1) * bytes_per_block)}, got {profile}; {way_out} "
        "--gpu-memory-utilization, or lower --max-num-batched-tokens"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
