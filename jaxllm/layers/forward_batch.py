"""The two device inputs of a step. Padding happens in worker/input_batch.py and nowhere else.

Shape letters, used in every docstring and comment of the device side:

    T tokens of a step (padded)     H query heads      N blocks in the KV cache
    S sequences of a step (padded)  K key-value heads  P tokens a block (block_size)
    R draws of a step (padded)      D head dim         B blocks a sequence (width of a block table)
    M model dim   F ffn dim         V vocabulary       L layers
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

# A numpy array on the host, a jax.Array on the device, a jax.ShapeDtypeStruct while a program is compiled.
BatchArray = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """The tokens of one step, sequence after sequence, and where their keys and values live.

    Padding tokens have id 0, position 0 and slot 0, which lies in null block 0: what they write is rubbish
    in a place that nobody reads. Padding sequences have seq_len 0 and no tokens.

    Example, block_size 4: sequence 0 decodes its 6th token from blocks 7 and 2, sequence 1 starts a prompt
    of three tokens in block 5. Then positions = [5, 0, 1, 2], slots = [2*4+1, 20, 21, 22],
    block_tables = [[7, 2], [5, 0]], seq_lens = [6, 3], query_start_loc = [0, 1, 4].

    Attributes:
      token_ids: [T] int32.
      positions: [T] int32, position of each token in its sequence.
      slots: [T] int32, where each token's key and value are written: block id * P + offset.
      block_tables: [S, B] int32, physical block ids in logical order; 0 past the end.
      seq_lens: [S] int32, tokens of each sequence up to and with this step.
      query_start_loc: [S + 1] int32, first token of each sequence; the tail repeats the number of tokens.
    """

    token_ids: BatchArray
    positions: BatchArray
    slots: BatchArray
    block_tables: BatchArray
    seq_lens: BatchArray
    query_start_loc: BatchArray


class LogitEdits(NamedTuple):
    """What becomes of single logits before they are drawn from, flat; no (row, token) stands here twice.

    (logit + bias), divided by its divisor if positive, else multiplied; then less its penalty.

    Attributes:
      rows: [C] int32, index of the draw. Padding has a row past the last one.
      token_ids: [C] int32.
      biases: [C] float32; -inf bans a token.
      divisors: [C] float32.
      penalties: [C] float32.
      is_restricted: [R] bool, draws that may give none but the tokens listed here.
    """

    rows: BatchArray
    token_ids: BatchArray
    biases: BatchArray
    divisors: BatchArray
    penalties: BatchArray
    is_restricted: BatchArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """How each draw of a step is made. Padding rows are greedy draws from token 0.

    Attributes:
      logits_indices: [R] int32, token of the step whose logits each draw uses. Several draws may share one.
      temperature: [R] float32; 0 is greedy.
      top_k: [R] int32; 0 keeps all.
      top_p: [R] float32.
      min_p: [R] float32.
      seeds: [R, 2] uint32, high and low half of each draw's 64-bit seed.
      positions: [R] int32, position of the token to be drawn; folded into the seed.
    """

    logits_indices: BatchArray
    temperature: BatchArray
    top_k: BatchArray
    top_p: BatchArray
    min_p: BatchArray
    seeds: BatchArray
    positions: BatchArray
