"""The types that cross a process or layer boundary. Read this first.

Every type is a msgspec Struct encoded as an array: fields are appended with defaults, never reordered.
No device array ever stands in a message. Times are seconds of the monotonic clock.

    EngineCoreRequest    InputProcessor -> EngineCore
    SchedulerOutput      Scheduler -> Worker
    ModelRunnerOutput    ModelRunner -> Scheduler
    EngineCoreOutputs    Scheduler -> OutputProcessor
    KVCacheInfo          Worker -> Scheduler, once, when the KV cache has been allocated
"""

from typing import Literal

import msgspec

from jaxllm.sampling_params import SamplingParams


class EngineCoreRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One validated, tokenized request. `seed` is always set: sequence i draws from seed + i."""

    request_id: str  # no other request ever has it, so that news of a dead one can't be taken for another's
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    arrival_time_s: float
    seed: int
    max_tokens: int  # already clipped to max_model_len
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = []  # ways to write what must not be written


class KVCacheInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the worker allocated. Block 0 is the null block and is counted in num_device_blocks."""

    num_device_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0  # with block 0, which is the null block here too; 0: nothing can be swapped
    num_warmup_compiles: int = 0  # programs made ready before the first step


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that the worker has no row for: new, forked, or coming back from preemption.

    token_ids holds the prompt and whatever has been generated; num_computed_tokens of them already have
    their keys and values in block_ids.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed_tokens: int
    seed: int
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []  # only where they matter to the draws: with min_tokens
    bad_words_token_ids: list[list[int]] = []


class CachedSequences(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What changed, column by column, for the scheduled sequences that the worker already has rows for."""

    seq_ids: list[int]
    new_token_ids: list[list[int]]  # appended since the worker last heard of this sequence
    new_block_ids: list[tuple[int, ...]]  # appended to the block table
    replaced_blocks: list[tuple[int, int, int]]  # (seq_id, index in its block table, block id), by copy-on-write


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step's work.

    A sequence samples in this step when num_scheduled_tokens reaches the end of its tokens; it then
    draws num_samples[seq_id] tokens (1 where it isn't listed).
    """

    step_id: int  # counts up by one; a gap is an error
    num_scheduled_tokens: dict[int, int]  # seq_id -> tokens of this step, in the order of the batch
    new_seqs: list[NewSequence]
    cached_seqs: CachedSequences
    num_samples: dict[int, int]
    blocks_to_copy: list[tuple[int, int]]  # (source, destination), copied before anything is written
    dropped_seq_ids: list[int]  # finished or preempted: the worker forgets these first
    blocks_to_swap_in: list[tuple[int, int]] = []  # (host, device), copied before blocks_to_copy
    blocks_to_swap_out: list[tuple[int, int]] = []  # (device, host), copied before everything else

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities at one position: the token that stands there, then the most likely ones."""

    logprob: float
    rank: int  # 1 is the most likely
    top_token_ids: list[int]
    top_logprobs: list[float]


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    token_id: int
    logprobs: TokenLogprobs | None = None


class BeamCandidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The most likely next tokens of one beam, most likely first."""

    token_ids: list[int]
    logprobs: list[float]


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the device computed in one step, without padding.

    sampled: seq_id -> its draws, for the sequences that sampled.
    beam_candidates: seq_id -> its next tokens, for the beams that sampled; these have no draws.
    prompt_logprobs: seq_id -> one entry a prompt position that this step scored, in order; position 0
      is never scored.
    num_padded_tokens: tokens that the step computed, padding included; 0 if nobody counts them.
    num_compiles: programs that had to be compiled since the first step.
    """

    sampled: dict[int, list[SampledToken]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    beam_candidates: dict[int, BeamCandidates] = {}
    num_padded_tokens: int = 0
    num_compiles: int = 0


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one of a request's sequences.

    A beam search says nothing until it ends; then each of its n best sequences comes whole, index 0 first.
    """

    index: int
    new_tokens: list[SampledToken]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # of the whole sequence; beam search only


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step added to one request."""

    request_id: str
    sequences: list[SequenceOutput]
    prompt_logprobs: list[TokenLogprobs]
    num_cached_tokens: int
    first_scheduled_time_s: float
    finished: bool


class SchedulerStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Counters since the start, and gauges of this moment."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    num_copied_blocks: int
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_swapped: int = 0  # requests in host memory
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_free_host_blocks: int = 0


class StepInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step was like. See ModelRunnerOutput for num_padded_tokens and num_compiles."""

    kind: Literal["prefill", "decode", "mixed"]
    duration_s: float
    num_tokens: int
    num_padded_tokens: int
    num_compiles: int


class RefusedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that the core didn't take, or gave up alone."""

    request_id: str
    message: str
    param: str | None = None
    is_our_fault: bool = False  # not the caller's


class EngineCoreOutputs(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="outputs"):
    """Every request's news of one step, and the counters after it."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    refused: list[RefusedRequest] = []  # only from a core in another process: it can't raise in the caller's
    step: StepInfo | None = None  # None where no step was run
    engine_index: int = 0  # which data parallel replica this is
