import jax.numpy as jnp
import pytest

from jaxllm.worker.programs import CompiledPrograms, Program
from jaxllm.worker.warmup import compile_programs


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
