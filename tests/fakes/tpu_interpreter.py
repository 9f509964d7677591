"""Pallas' TPU interpreter with all its checks, run so that it cannot hang."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

# Races are looked for, fresh memory is full of NaN, copies happen as late as they may.
INTERPRET = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", dma_execution_mode="on_wait"
)


def interpreted(kernel: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """A compiled kernel, with its interpret option set, whose results are complete when it returns.

    The interpreter's callbacks compute with JAX. While one does so, the CPU's runtime can deadlock
    with another operation that the caller dispatches (https://github.com/jax-ml/jax/issues/25861);
    a caller that waits dispatches none.
    """
    run = jax.jit(functools.partial(kernel, interpret=INTERPRET), **jit_options)
    return lambda *arguments, **options: jax.block_until_ready(run(*arguments, **options))
