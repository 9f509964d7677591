"""InputBatch: host rows of the live sequences, and the only padding in the project.

The scheduler sends differences; the rows here are what they apply to. A row belongs to one sequence until it is
dropped, and is written whole when a new sequence takes it.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxllm.intmath import cdiv
from jaxllm.layers.forward_batch import ForwardBatch, LogitEdits, SamplingBatch
from jaxllm.messages import NewSequence, SchedulerOutput
from jaxllm.worker.buckets import num_seqs_at, pass_lens, pick_bucket
from jaxllm.worker.logit_rules import LogitRules, rules_for

_MASK_64 = 2**64 - 1


class PromptPosition(NamedTuple):
    """A prompt position whose next token is to be scored."""

    seq_id: int
    token_index: int  # in the pass's tokens
    next_token_id: int


class DrawRound(NamedTuple):
    """Draws that are made together."""

    sampling: SamplingBatch
    seq_ids: list[int]  # of each real row of `sampling`, in order
    edits: LogitEdits | None  # None where no draw has any


class PassInputs(NamedTuple):
    """One forward pass's padded inputs (numpy), and what is needed to trim its outputs."""

    size: int  # the rung T
    batch: ForwardBatch
    draw_rounds: list[DrawRound]
    prompt_positions: list[PromptPosition]

    @property
    def draws(self) -> list[int]:
        """The sequence of each draw, in order."""
        return [seq_id for draws in self.draw_rounds for seq_id in draws.seq_ids]


class InputBatch:
    """Rows of tokens, block tables and sampling parameters, one a live sequence."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_draws: int,
        max_model_len: int,
        block_size: int,
        ladder: tuple[int, ...],
        num_stages: int = 1,
    ) -> None:
        self._ladder = ladder
        self._num_stages = num_stages
        self._max_num_draws = max_num_draws
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._last_step_id = -1
        self._rows: dict[int, int] = {}  # seq_id -> row
        self._free_rows = list(range(max_num_seqs))[::-1]
        self._num_prompt_logprobs: dict[int, int] = {}  # seq_id -> tokens to report, where asked for
        self._num_logprobs: dict[int, int] = {}
        self._num_candidates: dict[int, int] = {}  # seq_id -> candidates to report, of beams
        self._rules: dict[int, LogitRules] = {}  # by seq_id, of those that have any
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._block_tables = np.zeros((max_num_seqs, cdiv(max_model_len, block_size)), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)

    def num_logprobs(self, seq_id: int) -> int | None:
        """Most likely tokens to report with each sampled token; None for no log probabilities at all."""
        return self._num_logprobs.get(seq_id)

    def num_candidates(self, seq_id: int) -> int | None:
        """Next tokens to report for a beam; None for a sequence that draws."""
        return self._num_candidates.get(seq_id)

    def num_prompt_logprobs(self, seq_id: int) -> int:
        """Most likely tokens to report with each prompt token."""
        return self._num_prompt_logprobs[seq_id]

    def apply(self, step: SchedulerOutput) -> None:
        """Brings the rows up to date with what the scheduler decided.

        Raises:
          RuntimeError: A step is missing: the rows no longer match the scheduler's sequences.
        """
        if step.step_id != self._last_step_id + 1:
            raise RuntimeError(f"step {step.step_id} came after step {self._last_step_id}")
        self._last_step_id = step.step_id
        for seq_id in step.dropped_seq_ids:
            self._drop(seq_id)
        for sequence in step.new_seqs:
            self._add(sequence)
        cached = step.cached_seqs
        rows = np.array([self._rows[seq_id] for seq_id in cached.seq_ids], np.int32)
        _append(self._token_ids, self._num_tokens, rows, cached.new_token_ids)
        _append(self._block_tables, self._num_blocks, rows, cached.new_block_ids)
        for seq_id, index, block_id in cached.replaced_blocks:
            self._block_tables[self._rows[seq_id], index] = block_id

    def to_forward_batches(self, step: SchedulerOutput) -> list[PassInputs]:
        """Gathers and pads the step's tokens and draws, and counts the tokens as computed.

        Mostly one pass. A step longer than the ladder takes several, and so does one on several pipeline stages, in
        order: a sequence may begin in one and go on in the next, which reads what the first wrote to the KV cache.

        Longest sequences come first: the XLA attention works on groups of neighbours.
        """
        unsorted_ids = list(step.num_scheduled_tokens)
        unsorted_rows = np.array([self._rows[seq_id] for seq_id in unsorted_ids], np.int32)
        order = np.argsort(-self._num_computed[unsorted_rows], kind="stable")
        seq_ids = [unsorted_ids[index] for index in order.tolist()]
        rows = unsorted_rows[order]
        counts = np.array(list(step.num_scheduled_tokens.values()), np.int32)[order]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)  # first token of each sequence
        passes, begin = [], 0
        for num_tokens in pass_lens(self._ladder, int(first[-1]), self._num_stages):
            cuts = np.clip(first, begin, begin + num_tokens)
            mine = np.flatnonzero(np.diff(cuts))
            pass_ids = seq_ids if len(mine) == len(seq_ids) else [seq_ids[index] for index in mine.tolist()]
            passes.append(self._pass_inputs(step, pass_ids, rows[mine], np.diff(cuts)[mine]))
            begin += num_tokens
        return passes

    def _pass_inputs(
        self, step: SchedulerOutput, seq_ids: list[int], rows: np.ndarray, counts: np.ndarray
    ) -> PassInputs:
        """Returns the pass that computes the next `counts` tokens of these sequences."""
        starts = self._num_computed[rows]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        draws = np.flatnonzero(starts + counts == self._num_tokens[rows])  # each draw's sequence
        if step.num_samples:
            draws = np.repeat(draws, [step.num_samples.get(seq_ids[index], 1) for index in draws.tolist()])
        size = pick_bucket(self._ladder, max(int(first[-1]), min(len(draws), self._ladder[-1])))
        prompt_positions = self._prompt_positions(seq_ids, rows, starts, counts, first)
        batch = self._forward_batch(size, rows, starts, counts, first)
        draw_rounds = self._draw_rounds(size, seq_ids, rows, first, draws)
        self._num_computed[rows] += counts
        return PassInputs(size, batch, draw_rounds, prompt_positions)

    def _forward_batch(
        self, size: int, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, first: np.ndarray
    ) -> ForwardBatch:
        num_seqs, num_tokens = len(rows), int(first[-1])
        token_rows = np.repeat(rows, counts)
        positions = _counted_from(starts, counts)
        blocks = self._block_tables[token_rows, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        padded_seqs = num_seqs_at(size, self._max_num_seqs)
        block_tables = np.zeros((padded_seqs, self._block_tables.shape[1]), np.int32)
        block_tables[:num_seqs] = self._block_tables[rows]
        return ForwardBatch(
            token_ids=_pad(self._token_ids[token_rows, positions], size),
            positions=_pad(positions, size),
            slots=_pad(slots, size),
            block_tables=block_tables,
            seq_lens=_pad(starts + counts, padded_seqs),
            query_start_loc=_pad(first, padded_seqs + 1, fill=num_tokens),
        )

    def _draw_rounds(
        self, size: int, seq_ids: list[int], rows: np.ndarray, first: np.ndarray, draws: np.ndarray
    ) -> list[DrawRound]:
        padded = num_seqs_at(size, self._max_num_draws)
        # Draw i of a sequence uses its seed + i; sums wrap around at 64 bits.
        seeds = self._seeds[rows[draws]] + (np.arange(len(draws)) - np.searchsorted(draws, draws)).astype(np.uint64)
        rounds = []
        for start in range(0, len(draws), padded):
            mine = draws[start : start + padded]
            drawn = [seq_ids[index] for index in mine.tolist()]
            sampling = self._sampling_batch(padded, rows[mine], first[mine + 1] - 1, seeds[start : start + padded])
            rounds.append(DrawRound(sampling, drawn, self._logit_edits(padded, drawn)))
        return rounds

    def _sampling_batch(
        self, padded: int, draw_rows: np.ndarray, logits_indices: np.ndarray, seeds: np.ndarray
    ) -> SamplingBatch:
        halves = np.zeros((padded, 2), np.uint32)
        halves[: len(seeds), 0] = seeds >> np.uint64(32)
        halves[: len(seeds), 1] = seeds & np.uint64(0xFFFFFFFF)
        return SamplingBatch(
            logits_indices=_pad(logits_indices, padded),
            temperature=_pad(self._temperature[draw_rows], padded),
            top_k=_pad(self._top_k[draw_rows], padded),
            top_p=_pad(self._top_p[draw_rows], padded, fill=1),
            min_p=_pad(self._min_p[draw_rows], padded),
            seeds=halves,
            positions=_pad(self._num_tokens[draw_rows], padded),
        )

    def _logit_edits(self, padded: int, draws: list[int]) -> LogitEdits | None:
        if not self._rules:
            return None
        found = []
        is_restricted = np.zeros(padded, np.bool_)
        for draw, seq_id in enumerate(draws):
            rules, row = self._rules.get(seq_id), self._rows[seq_id]
            changes = None if rules is None else rules.adjustments(self._token_ids[row, : self._num_tokens[row]])
            if changes is not None:
                *columns, is_restricted[draw] = changes
                found.append((np.full(len(columns[0]), draw, np.int32), *columns))
        if not found:
            return None
        rows, token_ids, biases, divisors, penalties = (np.concatenate(column) for column in zip(*found, strict=True))
        return LogitEdits(rows, token_ids, biases, divisors, penalties, is_restricted)

    def _prompt_positions(
        self, seq_ids: list[int], rows: np.ndarray, starts: np.ndarray, counts: np.ndarray, first: np.ndarray
    ) -> list[PromptPosition]:
        if not self._num_prompt_logprobs:
            return []
        found = []
        for seq_id, row, start, count, offset in zip(seq_ids, rows, starts, counts, first[:-1], strict=True):
            if seq_id not in self._num_prompt_logprobs:
                continue
            for position in range(start, min(start + count, self._num_prompt_tokens[row] - 1)):
                next_token_id = int(self._token_ids[row, position + 1])
                found.append(PromptPosition(seq_id, int(offset + position - start), next_token_id))
        return found

    def _add(self, sequence: NewSequence) -> None:
        row = self._free_rows.pop()
        self._rows[sequence.seq_id] = row
        params = sequence.sampling_params
        self._num_tokens[row] = self._num_blocks[row] = 0
        _append(self._token_ids, self._num_tokens, np.array([row]), [sequence.token_ids])
        _append(self._block_tables, self._num_blocks, np.array([row]), [sequence.block_ids])
        self._num_prompt_tokens[row] = sequence.num_prompt_tokens
        self._num_computed[row] = sequence.num_computed_tokens
        self._temperature[row] = params.effective_temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = sequence.seed & _MASK_64
        rules = rules_for(sequence, self._token_ids.shape[1])
        if rules is not None:
            self._rules[sequence.seq_id] = rules
        if params.use_beam_search:
            self._num_candidates[sequence.seq_id] = max(2 * params.beam_width, params.logprobs or 0)
        elif params.logprobs is not None:
            self._num_logprobs[sequence.seq_id] = params.logprobs
        if params.prompt_logprobs is not None:
            self._num_prompt_logprobs[sequence.seq_id] = params.prompt_logprobs

    def _drop(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id)
        self._block_tables[row] = 0
        self._free_rows.append(row)
        self._num_logprobs.pop(seq_id, None)
        self._num_candidates.pop(seq_id, None)
        self._num_prompt_logprobs.pop(seq_id, None)
        self._rules.pop(seq_id, None)


def _append(table: np.ndarray, lens: np.ndarray, rows: np.ndarray, values: Sequence[Sequence[int]]) -> None:
    """Writes a list of values to the end of each of some rows, and counts them in `lens`."""
    counts = np.array([len(row_values) for row_values in values], np.int32)
    places = _counted_from(lens[rows], counts)
    if len(places):
        table[np.repeat(rows, counts), places] = list(chain.from_iterable(values))
        lens[rows] += counts


def _counted_from(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `count` numbers up from each start, in a row: starts [5, 0] and counts [1, 3] give [5, 0, 1, 2]."""
    ends = np.cumsum(counts, dtype=np.int32)
    num = int(ends[-1]) if len(ends) else 0
    return np.arange(num, dtype=np.int32) + np.repeat(starts + counts - ends, counts)


def _pad(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    padded = np.full(size, fill, values.dtype)
    padded[: len(values)] = values
    return padded
