"""Which tensors of a checkpoint the loader takes, leaves and misses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import CacheConfig, EngineConfig, SchedulerConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.hf_config import model_config_from_hf
from jaxllm.model_loader.loader import load_model
from jaxllm.worker.step_fn import split_model
from sharding.mesh import make_mesh
from tests.fakes.golden_families import GoldenCase, read_case, write_folder


def _load(path, case: GoldenCase, dtype=jnp.float32, max_model_len=32):
    config = EngineConfig(
        model=model_config_from_hf(case.config),
        model_path=write_folder(path, case),
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_model_len=max_model_len),
    )
    mesh = make_mesh(jax.local_devices()[:1])
    return load_model(config, mesh, jnp.dtype(dtype), jnp.dtype(dtype))


def _with(case: GoldenCase, **tensors: np.ndarray) -> GoldenCase:
    return case._replace(tensors={**case.tensors, **tensors})


@pytest.mark.parametrize(
    "family, name, prefix, mask", [("gpt2", "plain", "transformer.", "h.0.attn.bias"), ("opt", "plain", "model.", None)]
)
def test_a_bare_decoder_leaves_out_the_prefix(family, name, prefix, mask, tmp_path):
    case = read_case(family, name)
    bare = {key.removeprefix(prefix): values for key, values in case.tensors.items()}
    if mask is not None:  # the hub's GPT-2 also stores its causal mask
        bare[mask] = np.ones((1, 1, 64, 64), np.float32)
    whole, short = _load(tmp_path / "a", case), _load(tmp_path / "b", case._replace(tensors=bare))
    np.testing.assert_array_equal(whole.frame.embed.weight[...], short.frame.embed.weight[...])
    np.testing.assert_array_equal(whole.layers[1].mlp.up.weight[...], short.layers[1].mlp.up.weight[...])


def test_missing_and_left_over_tensors_are_named(tmp_path):
    case = read_case("llama", "gqa")
    lacking = {key: values for key, values in case.tensors.items() if "layers.1.mlp.up" not in key}
    with pytest.raises(ModelLoadError, match=r"lacks 'model.layers.1.mlp.up_proj.weight' \(1 missing and 0 left-over"):
        _load(tmp_path / "a", case._replace(tensors=lacking))
    extra = _with(case, **{"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)})
    with pytest.raises(ModelLoadError, match="has 'model.layers.0.self_attn.q_proj.bias', which LlamaForCausalLM"):
        _load(tmp_path / "b", extra)


def test_a_tied_head_may_be_stored_and_is_not_read(tmp_path):
    case = read_case("llama", "mqa_tied")
    embedding = case.tensors["model.embed_tokens.weight"]
    model = _load(tmp_path, _with(case, **{"lm_head.weight": np.zeros_like(embedding)}))
    np.testing.assert_array_equal(model.frame.embed.weight[...], embedding)


def test_deepseek_v3_carries_a_layer_too_many(tmp_path):
    case = read_case("deepseek_v3", "groups")
    model = _load(tmp_path, _with(case, **{"model.layers.2.eh_proj.weight": np.zeros((4, 8), np.float32)}))
    assert len(model.layers) == 2


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("model.norm.weight", (31,), r"must make an array of shape \(32,\) by the model's config, got \(31,\)"),
        ("model.layers.0.mlp.up_proj.weight", (48, 31), r"of shapes \[\(48, 32\), \(48, 31\)\] don't fit together"),
    ],
)
def test_wrong_shapes(name, shape, message, tmp_path):
    case = read_case("llama", "gqa")
    with pytest.raises(ModelLoadError, match=message):
        _load(tmp_path, _with(case, **{name: np.zeros(shape, np.float32)}))


def test_norms_and_routers_stay_in_float32(tmp_path):
    model = _load(tmp_path, read_case("mixtral", "top_2"), jnp.bfloat16)
    layer = model.layers[0]
    assert layer.mlp.experts.gate_up[...].dtype == model.frame.embed.weight[...].dtype == jnp.bfloat16
    assert layer.mlp_norm.weight[...].dtype == layer.mlp.router.scores.weight[...].dtype == jnp.float32


@pytest.mark.parametrize("max_model_len, field", [(16, "short_factor"), (17, "long_factor")])
def test_longrope_takes_the_factors_of_the_context_that_is_served(max_model_len, field, tmp_path):
    case = read_case("phi3", "long_rope")
    rope = _load(tmp_path, case, max_model_len=max_model_len).layers[0].attention.rope
    factors = np.array(case.config["rope_parameters"][field])
    np.testing.assert_allclose(rope.frequencies, 10000.0 ** (-np.arange(8) / 8) / factors, rtol=1e-6)


def test_layers_of_a_kind_share_their_static_attributes(tmp_path):
    """Two kinds of layers, windowed and full, make two programs however many layers there are."""
    case = read_case("gemma3", "pattern")
    kinds = [segment.kind for segment in split_model(_load(tmp_path, case), 1).segments]
    assert kinds == [0, 0, 1, 0]
