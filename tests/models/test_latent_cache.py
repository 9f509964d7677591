"""DeepSeek's cache: one array a layer that is keys and values at once, written in place."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.models.causal_lm import CausalLM
from jaxllm.models.deepseek import FAMILY
from jaxllm.worker.programs import ProgramShapes, list_programs
from jaxllm.worker.step_fn import split_model
from sharding.mesh import make_mesh
from tests.fakes.golden_families import GoldenRunner, read_case, write_folder

NUM_BLOCKS = 4096


def test_one_array_a_layer(tmp_path):
    case = read_case("deepseek_v3", "groups")
    runner = GoldenRunner(write_folder(tmp_path, case), case.config)
    latent, rotated = case.config["kv_lora_rank"], case.config["qk_rope_head_dim"]
    shapes = [[array.shape for array in layer] for layer in runner.caches]
    assert shapes == [[(32, 4, 1, latent + rotated)]] * 2


def test_the_cache_is_updated_in_place():
    config = model_config_from_hf(read_case("deepseek_v3", "groups").config)
    dtype = jnp.dtype(jnp.float32)
    layers = [FAMILY.build_layer(config, index, dtype) for index in range(2)]
    model = nnx.merge(*nnx.split(CausalLM(FAMILY.build_frame(config, dtype, dtype), layers)))
    cache = (jnp.zeros((NUM_BLOCKS, 16, 1, config.head_dim)),)
    shapes = ProgramShapes(
        ladder=(8,),
        max_num_seqs=4,
        blocks_per_seq=4,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        dtype=dtype,
    )
    programs = list_programs(split_model(model, 1), cache, shapes, make_mesh(jax.local_devices()[:1]))
    donating = [program for program in programs if program.donated]
    assert {program.name for program in donating} == {"layers_0", "layers_1", "copy_blocks", "scatter_blocks"}
    for program in donating:
        analysis = program.compile().memory_analysis()
        assert analysis.alias_size_in_bytes >= cache[0].nbytes, f"{program.name}: not in place"
        assert analysis.temp_size_in_bytes < cache[0].nbytes, f"{program.name} copies the cache"
