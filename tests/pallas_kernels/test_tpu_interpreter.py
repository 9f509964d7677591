"""No test of a TPU kernel may dispatch work while the interpreter computes: the runtime can deadlock then."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tests.fakes.tpu_interpreter import interpreted


def _double(x: jax.Array, interpret: object) -> jax.Array:
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)


def test_results_are_complete_when_they_return():
    """Also where an argument isn't complete yet, as then the runtime puts the call on another thread."""
    run, square = interpreted(_double), jax.jit(lambda x: x @ x)
    big, x = jnp.ones((2000, 2000)), jnp.arange(8 * 128.0).reshape(8, 128)
    square(big), run(x)
    for _ in range(3):
        pending = square(big)[:8, :128]
        out = run(x + pending)
        assert out.is_ready()
        np.testing.assert_array_equal(out, (x + 2000) * 2)


def test_no_test_interprets_by_itself():
    tests = Path(__file__).parents[1]
    word = "Interpret" + "Params"
    users = [path for path in tests.rglob("*.py") if word in path.read_text(encoding="utf-8")]
    assert users == [tests / "fakes" / "tpu_interpreter.py"]
