"""The arithmetic of device memory, with numbers computed by hand."""

import pytest

from jaxllm.exceptions import ConfigError
from jaxllm.worker.memory_profile import (
    MemoryProfile,
    ProgramMemory,
    activation_bytes,
    check_fits,
    dummy_batch_lens,
    num_device_blocks,
    num_host_blocks,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "lens"),
    [
        (10, 3, [4, 3, 3]),
        (11, 3, [4, 4, 3]),
        (9, 3, [3, 3, 3]),
        (2, 3, [1, 1]),
        (7, 1, [7]),
    ],
)
def test_the_remainder_goes_to_the_first_sequences_one_each(num_tokens: int, num_seqs: int, lens: list[int]) -> None:
    assert dummy_batch_lens(num_tokens, num_seqs) == lens


def test_16_gib_of_a_small_model() -> None:
    profile = MemoryProfile(total_bytes=16 * GIB, utilization=0.9, weight_bytes=3 * GIB, activation_bytes=1 * GIB)
    size = 589_824  # 2 x 12 layers x 16 tokens x 12 KV heads x 64 x 2 bytes
    assert profile.kv_bytes == 11_166_914_969
    assert num_device_blocks(profile.kv_bytes, size) == 18_932
    assert num_host_blocks(4 * GIB, size) == 7_281
    assert str(profile) == (
        "16.00 GiB of device memory x gpu_memory_utilization 0.9 - weights 3.00 GiB - activations 1.00 GiB "
        "= 10.40 GiB for KV"
    )


def test_too_little_memory_is_no_negative_number_of_blocks() -> None:
    profile = MemoryProfile(total_bytes=GIB, utilization=0.5, weight_bytes=GIB, activation_bytes=0)
    assert profile.kv_bytes == 0
    assert num_device_blocks(-1, 10) == num_host_blocks(-1, 10) == 0


def test_temporaries_take_turns_and_results_stay() -> None:
    assert activation_bytes([ProgramMemory(100, 7), ProgramMemory(300, 0), ProgramMemory(20, 5)]) == 312


def _profile(kv_bytes: int) -> MemoryProfile:
    return MemoryProfile(
        total_bytes=4 * GIB + kv_bytes, utilization=1.0, weight_bytes=3 * GIB, activation_bytes=1 * GIB
    )


def test_one_sequence_of_full_length_must_fit_beside_the_null_block() -> None:
    check_fits(_profile(9 << 20), bytes_per_block=1 << 20, block_size=16, max_model_len=128)
    with pytest.raises(ConfigError) as caught:
        check_fits(_profile(9 << 20), bytes_per_block=1 << 20, block_size=16, max_model_len=129)
    message = str(caught.value)
    assert "max_model_len=129 tokens" in message and "set --max-model-len 128 or less" in message
    assert "weights 3.00 GiB - activations 1.00 GiB = 0.01 GiB for KV" in message
    assert "\n" not in message


@pytest.mark.parametrize("kv_bytes", [0, (2 << 20) - 1])
def test_where_nothing_fits_no_length_is_offered(kv_bytes: int) -> None:
    with pytest.raises(ConfigError, match="nothing fits: raise --gpu-memory-utilization"):
        check_fits(_profile(kv_bytes), bytes_per_block=1 << 20, block_size=16, max_model_len=16)
