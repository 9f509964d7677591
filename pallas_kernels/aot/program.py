"""What a row of the table compiles, and how much work the compiled loops have."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What one call of a program does, whatever the compiler makes of it."""

    needed_bytes: float  # what a perfect kernel moves
    needed_flops: float  # and multiplies and adds
    moved_bytes: float  # what this one moves between HBM and its own memory, padding and repeated reads with it
    first_bytes: float = 0  # of them, those that arrive before the first computation can start
    kv_tokens: int = 0  # KV tokens that the main loop goes over, for bundles per KV token; 0: no decode
    needed_int8_ops: float = 0  # multiplies and adds that a perfect kernel does in int8
    product_width: int = 0  # the narrower side of its products, head_dim in attention; 0: wide enough for any chip


class Trips(NamedTuple):
    """How often the loops of one kernel run, in the whole call."""

    # The loop with the most bundles and those around it, outermost first: how often each body runs. A loop that the
    # compiler dissolved is missing from the left.
    bodies: tuple[float, ...]
    # A loop beside these that starts copies: how often its body runs each time.
    copies: float = 1
    # If the computation exists in versions of which one is taken each time: the share of each, in program order.
    arms: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function to compile, with one real shape."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # trees of jax.ShapeDtypeStruct
    donated: tuple[int, ...] = ()  # positions of arguments that the function may overwrite
    step_arguments: tuple[int, ...] = ()  # positions of arguments that are the same in every layer of a model
    work: Work
    trips: Mapping[str, Trips]  # by kernel name
