"""What of a model fits in a slice's memory, and which exchanges are refused, by hand; scripts/aot_models compiles."""

import jax
import pytest

from jaxllm.config import ModelConfig
from jaxllm.worker.collectives import Collective
from jaxllm.worker.plan import StagePlan
from jaxllm.worker.whole_models import is_gathered_state, num_seqs_that_fit, plan, weight_bytes
from sharding.mesh import make_mesh

_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=4096,
)
# A device's eighth of embedding and logits, and of each layer's qkv, output, gate and up, and down. Norms are whole.
_NUMBERS = (2 * 256 * 128 + 2 * (24 * 128 * 128 + 128 * 1024 + 1024 * 128 + 128 * 512)) // 8
_NORM_BYTES = 4 * (128 + 2 * 2 * 128)
_WEIGHT_BYTES = 2 * _NUMBERS + _NORM_BYTES
_BLOCK_BYTES = 2 * 2 * 128 * 128 * 2  # two layers, keys and values, tokens, one head, bfloat16
_SEQ_BYTES = 32 * _BLOCK_BYTES


@pytest.fixture(scope="module")
def stage() -> StagePlan:
    return plan(_MODEL, make_mesh([jax.local_devices()[0]] * 8), None, 64)


def test_weights_are_counted_as_one_device_holds_them(stage: StagePlan) -> None:
    assert weight_bytes(stage) == _WEIGHT_BYTES == 379392


def test_int8_takes_a_byte_a_number_and_four_an_output() -> None:
    quantized = plan(_MODEL, make_mesh([jax.local_devices()[0]] * 8), "int8", 64)
    # An output's scale lies where the output does; those of products that devices add up are whole.
    outputs = 2 * 256 // 8 + 2 * (24 * 128 // 8 + 1024 // 8 + 2 * 128)
    assert weight_bytes(quantized) == _NUMBERS + 4 * outputs + _NORM_BYTES == 197376


@pytest.mark.parametrize(
    ("spare_bytes", "num_seqs"),
    [
        (-1, 0),
        (_BLOCK_BYTES + 3 * _SEQ_BYTES, 3),
        (_BLOCK_BYTES + 3 * _SEQ_BYTES - 2, 2),
        (200 * _SEQ_BYTES, 64),
    ],
)
def test_the_cache_takes_what_weights_leave_of_nine_tenths(stage: StagePlan, spare_bytes: int, num_seqs: int) -> None:
    hbm_bytes = -(-(_WEIGHT_BYTES + spare_bytes) * 10 // 9)
    assert num_seqs_that_fit(stage, hbm_bytes) == num_seqs


@pytest.mark.parametrize(
    ("exchange", "is_refused"),
    [
        (Collective("all-gather", 16, True), True),
        (Collective("all-gather", 16, False), False),
        (Collective("all-gather", (1 + 64 * 32) * _BLOCK_BYTES // 2, False), True),
        (Collective("all-gather", (1 + 64 * 32) * _BLOCK_BYTES // 2 - 1, False), False),
        (Collective("all-reduce", 1 << 40, False), False),
    ],
)
def test_gathering_a_weight_or_a_layers_cache_is_refused(
    stage: StagePlan, exchange: Collective, is_refused: bool
) -> None:
    assert is_gathered_state(exchange, stage) == is_refused
