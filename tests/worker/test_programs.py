import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.models.causal_lm import CausalLM, build_frame
from jaxllm.models.llama import build_layer
from jaxllm.worker.buckets import token_ladder
from jaxllm.worker.programs import CompiledPrograms, Program, ProgramShapes, list_programs
from jaxllm.worker.step_fn import split_model
from jaxllm.worker.warmup import compile_programs, measure_activations
from pallas_kernels.paged_attention import KVLayout
from sharding.mesh import make_mesh
from tests.fakes.tiny_models import tiny_llama


def test_what_was_not_compiled_at_start_is_an_error():
    programs = compile_programs([Program("double", 2, lambda x: x * 2, (jnp.zeros(2),))])
    assert programs("double", 2, jnp.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match=r"program double was compiled for sizes \[2\], not for 3"):
        programs("double", 3, jnp.ones(3))
    with pytest.raises(TypeError):
        programs("double", 2, jnp.ones(3))  # the rung is right, the array isn't: no silent compile either


def test_nothing_compiled_names_nothing():
    with pytest.raises(RuntimeError, match=r"sizes \[\], not for 1"):
        CompiledPrograms({})("sample", 1)


def _tiny_programs(
    ladder: tuple[int, ...], num_blocks: int, num_kv_heads: int = 2, cache_dtype: str = "float32"
) -> list[Program]:
    config = model_config_from_hf(tiny_llama(num_key_value_heads=num_kv_heads).config)
    layers = [build_layer(config, i, jnp.float32) for i in range(2)]
    model = CausalLM(build_frame(config, jnp.float32, jnp.float32), layers)
    model = nnx.merge(*nnx.split(model))
    layout = KVLayout(
        backend="xla",
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(cache_dtype),
    )
    shapes = ProgramShapes(
        ladder=ladder,
        max_num_seqs=8,
        max_num_draws=8,
        blocks_per_seq=16,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        dtype=jnp.float32,
    )
    return list_programs(split_model(model, 1), layout.zeros(num_blocks), shapes, make_mesh(jax.local_devices()[:1]))


@pytest.mark.parametrize(
    ("num_kv_heads", "cache_dtype"),
    [(2, "float32"), (1, "float32"), (2, "bfloat16"), (2, "int8"), (2, "float8_e4m3fn")],
)
def test_no_program_copies_the_kv_cache(num_kv_heads, cache_dtype):
    num_blocks = 4096 * (4 // jnp.dtype(cache_dtype).itemsize)
    cache_bytes = num_blocks * 16 * num_kv_heads * 16 * jnp.dtype(cache_dtype).itemsize
    ladder = token_ladder(64, "cpu") if (num_kv_heads, cache_dtype) == (2, "float32") else (8,)
    for program in _tiny_programs(ladder, num_blocks, num_kv_heads, cache_dtype):
        if program.donated:
            analysis = program.compile().memory_analysis()
            assert analysis.alias_size_in_bytes >= 2 * cache_bytes, f"{program.name}[{program.size}]: not in place"
            assert analysis.temp_size_in_bytes < cache_bytes, f"{program.name}[{program.size}] copies the KV cache"


def test_activations_do_not_depend_on_the_number_of_blocks():
    small, large = (measure_activations(_tiny_programs((16,), num_blocks)) for num_blocks in (17, 4096))
    logits_bytes = 8 * 320 * 4
    assert logits_bytes < small == large < 4 << 20


def test_the_list_of_programs():
    names = [(program.name, program.size) for program in _tiny_programs((2, 16), num_blocks=4)]
    assert names == [
        *[("embed", 2), ("layers_0", 2), ("logits", 2), ("embed", 16), ("layers_0", 16), ("logits", 16)],
        *[("sample", 2), ("score", 2), ("edit_logits", 2), ("sample", 8), ("score", 8), ("edit_logits", 8)],
        *[("copy_blocks", 16), ("gather_blocks", 16), ("scatter_blocks", 16)],
    ]
