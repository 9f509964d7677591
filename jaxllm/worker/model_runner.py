"""ModelRunner: SchedulerOutput in, ModelRunnerOutput out. Pads on the way in, trims on the way out."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.layers.sampler import ScoredTokens
from jaxllm.messages import BeamCandidates, ModelRunnerOutput, SampledToken, SchedulerOutput, TokenLogprobs
from jaxllm.worker.buckets import num_seqs_at
from jaxllm.worker.compile_counter import CompileCounter
from jaxllm.worker.input_batch import DrawRound, InputBatch, PassInputs, PromptPosition
from jaxllm.worker.pipeline import Pipeline

Hidden = jax.Array | None  # None in a process that has no part of the last stage


class ModelRunner:
    """Runs one step: the rows of InputBatch through the pipeline."""

    def __init__(
        self, pipeline: Pipeline, input_batch: InputBatch, max_num_draws: int, compile_counter: CompileCounter
    ) -> None:
        self._pipeline = pipeline
        self._compile_counter = compile_counter
        self._input_batch = input_batch
        self._max_num_draws = max_num_draws

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the step's tokens, writes their keys and values, and draws what is due."""
        self._input_batch.apply(step)
        self._pipeline.move_blocks(step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy)
        passes = self._input_batch.to_forward_batches(step)
        # All are under way before the first draw is waited for.
        hiddens = [self._pipeline.forward(inputs.size, inputs.batch) for inputs in passes]
        sampled: dict[int, list[SampledToken]] = {}
        candidates: dict[int, BeamCandidates] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for inputs, hidden in zip(passes, hiddens, strict=True):
            for draws in inputs.draw_rounds:
                self._sample(inputs.size, hidden, draws, sampled, candidates)
            self._score_prompts(inputs, hidden, prompt_logprobs)
        num_padded_tokens = sum(inputs.size for inputs in passes)
        return ModelRunnerOutput(
            sampled, prompt_logprobs, candidates, num_padded_tokens, self._compile_counter.num_compiles
        )

    def _sample(
        self,
        num_tokens: int,
        hidden: Hidden,
        draws: DrawRound,
        sampled: dict[int, list[SampledToken]],
        candidates: dict[int, BeamCandidates],
    ) -> None:
        """Adds a round's draws of the sequences that draw, and its candidates of those that are beams."""
        num_logprobs = [self._input_batch.num_logprobs(seq_id) for seq_id in draws.seq_ids]
        num_candidates = [self._input_batch.num_candidates(seq_id) for seq_id in draws.seq_ids]
        has_scores = any(num is not None for num in num_logprobs + num_candidates)
        chosen, scored = self._pipeline.draw(num_tokens, hidden, draws.sampling, draws.edits, has_scores)
        token_ids = chosen.tolist()[: len(draws.seq_ids)]  # rows past the draws are padding
        for row, (seq_id, token_id) in enumerate(zip(draws.seq_ids, token_ids, strict=True)):
            num, num_beam = num_logprobs[row], num_candidates[row]
            if num_beam is not None:
                candidates[seq_id] = _beam_candidates(scored, row, num_beam)
            else:
                token = SampledToken(token_id, None if num is None else _token_logprobs(scored, row, num))
                sampled.setdefault(seq_id, []).append(token)

    def _score_prompts(self, inputs: PassInputs, hidden: Hidden, scores: dict[int, list[TokenLogprobs]]) -> None:
        """Adds the scores of prompt tokens, computed as many at a time as a round of draws has rows."""
        size = num_seqs_at(inputs.size, self._max_num_draws)
        positions = inputs.prompt_positions
        for first in range(0, len(positions), size):
            group = positions[first : first + size]
            scored = self._score_group(group, inputs.size, size, hidden)
            for row, position in enumerate(group):
                num = self._input_batch.num_prompt_logprobs(position.seq_id)
                scores.setdefault(position.seq_id, []).append(_token_logprobs(scored, row, num))

    def _score_group(self, group: Sequence[PromptPosition], num_tokens: int, size: int, hidden: Hidden) -> ScoredTokens:
        indices, token_ids = np.zeros(size, np.int32), np.zeros(size, np.int32)
        indices[: len(group)] = [position.token_index for position in group]
        token_ids[: len(group)] = [position.next_token_id for position in group]
        return self._pipeline.score(num_tokens, hidden, indices, token_ids)


def _token_logprobs(scored: Any, row: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(scored.logprobs[row]),
        int(scored.ranks[row]),
        scored.top_token_ids[row, :num_top].tolist(),
        scored.top_logprobs[row, :num_top].tolist(),
    )


def _beam_candidates(scored: Any, row: int, num: int) -> BeamCandidates:
    return BeamCandidates(scored.top_token_ids[row, :num].tolist(), scored.top_logprobs[row, :num].tolist())
