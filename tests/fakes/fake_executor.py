"""FakeExecutor: an executor whose model is a function, and which checks every step that it is given.

It keeps the rows of a worker and a block array. In place of keys and values it writes, for each token, a hash
of that token and of all before it: what a block holds thus tells exactly which prefix it was computed for.
Wrong sharing, a stale cached block, a missing or late copy, a lost diff: each makes a step fail with an
AssertionError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from jaxllm.messages import (
    BeamCandidates,
    KVCacheInfo,
    ModelRunnerOutput,
    NewSequence,
    SampledToken,
    SchedulerOutput,
    TokenLogprobs,
)
from jaxllm.sampling_params import SamplingParams
from tests.fakes.local_executor import LocalExecutor

_GARBAGE = -1


@dataclass(slots=True, eq=False)
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    seed: int
    sampling_params: SamplingParams
    prefix_hashes: list[int]  # one a token


class FakeExecutor(LocalExecutor):
    """Runs steps on a simulated block array.

    Args:
      next_token: Token ids so far -> next token.
      draw: The same with the draw's seed as second argument; overrides next_token.
      candidates: Token ids so far -> every next token with its log probability, in any order; for beams.
      num_blocks, block_size, max_num_seqs, max_num_batched_tokens, num_host_blocks: What initialize() reports.

    Attributes:
      steps: Every SchedulerOutput so far.
    """

    def __init__(
        self,
        next_token: Callable[[Sequence[int]], int] = lambda token_ids: token_ids[-1] + 1,
        *,
        draw: Callable[[Sequence[int], int], int] | None = None,
        candidates: Callable[[Sequence[int]], dict[int, float]] | None = None,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        num_host_blocks: int = 0,
    ) -> None:
        self._draw = draw or (lambda token_ids, seed: next_token(token_ids))
        self._candidates = candidates
        self._info = KVCacheInfo(num_blocks, block_size, max_num_seqs, max_num_batched_tokens, num_host_blocks)
        self._cache = np.full((num_blocks, block_size), _GARBAGE, np.int64)
        self._host_cache = np.full((num_host_blocks, block_size), _GARBAGE, np.int64)
        self._rows: dict[int, Row] = {}
        self.steps: list[SchedulerOutput] = []
        self.is_shut_down = False

    def initialize(self) -> KVCacheInfo:
        return self._info

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        # Through bytes, as between processes: what the scheduler changes later must not show here.
        step = msgspec.msgpack.decode(msgspec.msgpack.encode(scheduler_output), type=SchedulerOutput)
        assert not self.is_shut_down
        assert step.step_id == len(self.steps), "a gap in step_id"
        self.steps.append(step)
        self._update_rows(step)
        self._check_limits(step)
        assert not (step.blocks_to_swap_in and step.blocks_to_swap_out), "swapped in and out in one step"
        _copy_blocks(self._cache, self._host_cache, step.blocks_to_swap_out)
        _copy_blocks(self._host_cache, self._cache, step.blocks_to_swap_in)
        for host_id, _ in step.blocks_to_swap_in:  # free from now on: nobody may read it again
            self._host_cache[host_id] = _GARBAGE
        _copy_blocks(self._cache, self._cache, step.blocks_to_copy)
        for seq_id in step.num_scheduled_tokens:
            self._check_content(seq_id, self._rows[seq_id].num_computed_tokens, "before the step's writes")
        self._write(step)
        for seq_id, num_tokens in step.num_scheduled_tokens.items():
            self._check_content(seq_id, self._rows[seq_id].num_computed_tokens + num_tokens, "in attention")
        return self._sample(step)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _update_rows(self, step: SchedulerOutput) -> None:
        for seq_id in step.dropped_seq_ids:
            del self._rows[seq_id]
        for new in step.new_seqs:
            assert new.seq_id not in self._rows, "a known sequence came as new"
            self._rows[new.seq_id] = _new_row(new)
        cached = step.cached_seqs
        for seq_id, token_ids, block_ids in zip(
            cached.seq_ids, cached.new_token_ids, cached.new_block_ids, strict=True
        ):
            row = self._rows[seq_id]
            row.token_ids += token_ids
            row.block_ids += block_ids
        for seq_id, block_idx, block_id in cached.replaced_blocks:
            row = self._rows[seq_id]
            assert (row.block_ids[block_idx], block_id) in step.blocks_to_copy, "a block replaced without a copy"
            row.block_ids[block_idx] = block_id
        touched = [new.seq_id for new in step.new_seqs] + cached.seq_ids
        assert sorted(touched) == sorted(step.num_scheduled_tokens), "rows touched aren't the rows scheduled"
        for seq_id in touched:
            _extend_hashes(self._rows[seq_id])

    def _check_limits(self, step: SchedulerOutput) -> None:
        assert 0 < step.num_tokens <= self._info.max_num_batched_tokens
        assert len(step.num_scheduled_tokens) <= self._info.max_num_seqs
        assert len(self._rows) <= self._info.max_num_seqs
        num_draws = 0
        for seq_id, num_tokens in step.num_scheduled_tokens.items():
            row = self._rows[seq_id]
            end = row.num_computed_tokens + num_tokens
            assert 0 < num_tokens and end <= len(row.token_ids) and end <= len(row.block_ids) * self._info.block_size
            assert 0 not in row.block_ids, "a sequence owns the null block"
            is_last = end == len(row.token_ids)
            assert is_last or seq_id not in step.num_samples, "draws from a half computed prompt"
            num_draws += step.num_samples.get(seq_id, 1) if is_last else 0
        assert num_draws <= self._info.max_num_seqs

    def _check_content(self, seq_id: int, num_tokens: int, when: str) -> None:
        row = self._rows[seq_id]
        held = self._cache[row.block_ids].reshape(-1)[:num_tokens]
        assert held.tolist() == row.prefix_hashes[:num_tokens], f"sequence {seq_id} reads foreign content {when}"

    def _write(self, step: SchedulerOutput) -> None:
        written: set[tuple[int, int]] = set()
        for seq_id, num_tokens in step.num_scheduled_tokens.items():
            row = self._rows[seq_id]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                place = (row.block_ids[position // self._info.block_size], position % self._info.block_size)
                assert place not in written, "two sequences write one place"
                written.add(place)
                self._cache[place] = row.prefix_hashes[position]

    def _sample(self, step: SchedulerOutput) -> ModelRunnerOutput:
        sampled: dict[int, list[SampledToken]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        beams: dict[int, BeamCandidates] = {}
        for seq_id, num_tokens in step.num_scheduled_tokens.items():
            row = self._rows[seq_id]
            start, row.num_computed_tokens = row.num_computed_tokens, row.num_computed_tokens + num_tokens
            if row.num_computed_tokens == len(row.token_ids) and row.sampling_params.use_beam_search:
                beams[seq_id] = self._beam_candidates(row)
            elif row.num_computed_tokens == len(row.token_ids):
                num_draws = step.num_samples.get(seq_id, 1)
                sampled[seq_id] = [self._draw_token(row, row.seed + index) for index in range(num_draws)]
            if row.sampling_params.prompt_logprobs is not None:
                end = min(row.num_computed_tokens + 1, row.num_prompt_tokens)
                prompt_logprobs[seq_id] = [_position_logprobs(row, position) for position in range(start + 1, end)]
        return ModelRunnerOutput(sampled, prompt_logprobs, beams)

    def _beam_candidates(self, row: Row) -> BeamCandidates:
        assert self._candidates is not None, "a beam came, and the fake has no candidates"
        logprobs = self._candidates(tuple(row.token_ids))
        best = sorted(logprobs, key=lambda token_id: -logprobs[token_id])[: 2 * row.sampling_params.beam_width]
        return BeamCandidates(best, [logprobs[token_id] for token_id in best])

    def _draw_token(self, row: Row, seed: int) -> SampledToken:
        token_id = self._draw(tuple(row.token_ids), seed)
        if row.sampling_params.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, TokenLogprobs(-1.0, 1, [token_id], [-1.0]))


def _new_row(new: NewSequence) -> Row:
    return Row(
        token_ids=list(new.token_ids),  # self.steps keeps what was sent
        num_prompt_tokens=new.num_prompt_tokens,
        block_ids=list(new.block_ids),
        num_computed_tokens=new.num_computed_tokens,
        seed=new.seed,
        sampling_params=new.sampling_params,
        prefix_hashes=[],
    )


def _copy_blocks(source: np.ndarray, target: np.ndarray, pairs: list[tuple[int, int]]) -> None:
    destinations = [destination for _, destination in pairs]
    assert len(set(destinations)) == len(destinations) and 0 not in destinations, "two copies into one block"
    target[destinations] = source[[source_id for source_id, _ in pairs]]


def _extend_hashes(row: Row) -> None:
    for token_id in row.token_ids[len(row.prefix_hashes) :]:
        before = row.prefix_hashes[-1] if row.prefix_hashes else 17
        row.prefix_hashes.append(hash((before, token_id)) & 0x7FFFFFFFFFFFFFFF)


def _position_logprobs(row: Row, position: int) -> TokenLogprobs:
    """Logprobs that tell their position: its negative."""
    return TokenLogprobs(-float(position), 1, [row.token_ids[position]], [-float(position)])
