"""ModelRunner: SchedulerOutput in, ModelRunnerOutput out. Pads on the way in, trims on the way out."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.layers.attention import LayerCache
from jaxllm.layers.forward_batch import LogitBias
from jaxllm.layers.sampler import ScoredTokens
from jaxllm.messages import BeamCandidates, ModelRunnerOutput, SampledToken, SchedulerOutput, TokenLogprobs
from jaxllm.worker.buckets import num_seqs_at
from jaxllm.worker.cache_engine import CacheEngine
from jaxllm.worker.compile_counter import CompileCounter
from jaxllm.worker.input_batch import DrawRound, InputBatch, PassInputs, PromptPosition
from jaxllm.worker.programs import BIAS_BATCH, CompiledPrograms
from jaxllm.worker.step_fn import StepModel


class ModelRunner:
    """Runs one step: the programs of programs.py in order, on the rows of InputBatch."""

    def __init__(
        self,
        model: StepModel,
        cache_engine: CacheEngine,
        input_batch: InputBatch,
        programs: CompiledPrograms,
        max_num_draws: int,
        compile_counter: CompileCounter,
    ) -> None:
        self._model = model
        self._compile_counter = compile_counter
        self._cache_engine = cache_engine
        self._input_batch = input_batch
        self._programs = programs
        self._max_num_draws = max_num_draws

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the step's tokens, writes their keys and values, and draws what is due."""
        self._input_batch.apply(step)
        self._cache_engine.swap_out(step.blocks_to_swap_out, self._programs)
        self._cache_engine.swap_in(step.blocks_to_swap_in, self._programs)
        self._cache_engine.copy(step.blocks_to_copy, self._programs)
        passes = self._input_batch.to_forward_batches(step)
        hiddens = [self._forward(inputs) for inputs in passes]  # all are under way before the first draw is waited for
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

    def _forward(self, inputs: PassInputs) -> jax.Array:
        """Returns the last layer's output [T, M]."""
        batch = jax.device_put(inputs.batch)
        hidden = self._programs("embed", inputs.size, self._model.frame, batch.token_ids, batch.positions)
        caches = self._cache_engine.caches
        updated: list[LayerCache] = []
        for segment in self._model.segments:
            mine = caches[len(updated) : len(updated) + segment.num_layers]
            hidden, mine = self._programs(f"layers_{segment.kind}", inputs.size, segment.weights, hidden, batch, mine)
            updated.extend(mine)
        self._cache_engine.caches = tuple(updated)
        return hidden

    def _sample(
        self,
        num_tokens: int,
        hidden: jax.Array,
        draws: DrawRound,
        sampled: dict[int, list[SampledToken]],
        candidates: dict[int, BeamCandidates],
    ) -> None:
        """Adds a round's draws of the sequences that draw, and its candidates of those that are beams."""
        sampling = jax.device_put(draws.sampling)
        logits = self._logits(num_tokens, hidden, sampling.logits_indices)
        size = logits.shape[0]
        chosen = self._programs("sample", size, self._with_bias(logits, draws.bias), sampling)
        token_ids = np.asarray(chosen).tolist()[: len(draws.seq_ids)]  # rows past the draws are padding
        num_logprobs = [self._input_batch.num_logprobs(seq_id) for seq_id in draws.seq_ids]
        num_candidates = [self._input_batch.num_candidates(seq_id) for seq_id in draws.seq_ids]
        scored: Any = None
        if any(num is not None for num in num_logprobs + num_candidates):
            scored = jax.device_get(self._programs("score", size, logits, chosen))
        for row, (seq_id, token_id) in enumerate(zip(draws.seq_ids, token_ids, strict=True)):
            num, num_beam = num_logprobs[row], num_candidates[row]
            if num_beam is not None:
                candidates[seq_id] = _beam_candidates(scored, row, num_beam)
            else:
                token = SampledToken(token_id, None if num is None else _token_logprobs(scored, row, num))
                sampled.setdefault(seq_id, []).append(token)

    def _with_bias(self, logits: jax.Array, bias: LogitBias | None) -> jax.Array:
        """Returns logits to draw from; the given ones stay as they are."""
        if bias is None:
            return logits
        for first in range(0, len(bias.rows), BIAS_BATCH):
            columns = [jax.device_put(_padded(column[first : first + BIAS_BATCH], BIAS_BATCH)) for column in bias]
            logits = self._programs("add_bias", logits.shape[0], logits, *columns)
        return logits

    def _score_prompts(self, inputs: PassInputs, hidden: jax.Array, scores: dict[int, list[TokenLogprobs]]) -> None:
        """Adds the scores of prompt tokens, computed as many at a time as a round of draws has rows."""
        size = num_seqs_at(inputs.size, self._max_num_draws)
        positions = inputs.prompt_positions
        for first in range(0, len(positions), size):
            group = positions[first : first + size]
            scored = self._score_group(group, inputs.size, size, hidden)
            for row, position in enumerate(group):
                num = self._input_batch.num_prompt_logprobs(position.seq_id)
                scores.setdefault(position.seq_id, []).append(_token_logprobs(scored, row, num))

    def _score_group(
        self, group: Sequence[PromptPosition], num_tokens: int, size: int, hidden: jax.Array
    ) -> ScoredTokens:
        indices, token_ids = np.zeros(size, np.int32), np.zeros(size, np.int32)
        indices[: len(group)] = [position.token_index for position in group]
        token_ids[: len(group)] = [position.next_token_id for position in group]
        logits = self._logits(num_tokens, hidden, jax.device_put(indices))
        return jax.device_get(self._programs("score", size, logits, jax.device_put(token_ids)))

    def _logits(self, size: int, hidden: jax.Array, indices: jax.Array) -> jax.Array:
        return self._programs("logits", size, self._model.frame, hidden, indices)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, values.dtype)
    padded[: len(values)] = values
    return padded


def _token_logprobs(scored: ScoredTokens, row: int, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        float(scored.logprobs[row]),
        int(scored.ranks[row]),
        scored.top_token_ids[row, :num_top].tolist(),
        scored.top_logprobs[row, :num_top].tolist(),
    )


def _beam_candidates(scored: ScoredTokens, row: int, num: int) -> BeamCandidates:
    return BeamCandidates(scored.top_token_ids[row, :num].tolist(), scored.top_logprobs[row, :num].tolist())
