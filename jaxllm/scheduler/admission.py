"""What can never run is refused when it is added, with numbers: it would block the queue for ever."""

from jaxllm.config import SchedulerConfig
from jaxllm.exceptions import InvalidRequestError
from jaxllm.intmath import cdiv
from jaxllm.messages import EngineCoreRequest, KVCacheInfo

MAX_TOKEN_ID = 2**31 - 1


class Admission:
    """The rules of one engine. The front end asks them before it sends a request, the scheduler before it takes one."""

    def __init__(self, config: SchedulerConfig, kv_info: KVCacheInfo) -> None:
        self._max_num_seqs = min(config.max_num_seqs, kv_info.max_num_seqs)
        self._max_model_len = config.max_model_len
        self._block_size = kv_info.block_size
        self._num_usable_blocks = kv_info.num_device_blocks - 1  # without the null block
        self._num_promptable_blocks = self._num_usable_blocks - num_watermark_blocks(config, self._num_usable_blocks)

    def check(self, request: EngineCoreRequest) -> None:
        """Checks that a request could run, alone if need be.

        Raises:
          InvalidRequestError: It could not.
        """
        check_request(request, self._max_num_seqs, self._max_model_len)
        check_blocks(
            request, self._max_model_len, self._block_size, self._num_usable_blocks, self._num_promptable_blocks
        )


def num_watermark_blocks(config: SchedulerConfig, num_usable_blocks: int) -> int:
    """Returns how many blocks somebody who comes in must leave free."""
    return int(config.watermark * num_usable_blocks)


def check_request(request: EngineCoreRequest, max_num_seqs: int, max_model_len: int) -> None:
    """Checks the request's own numbers.

    Raises:
      InvalidRequestError: It could not.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    n = request.sampling_params.n
    if not num_prompt_tokens:
        raise InvalidRequestError("the prompt must hold at least 1 token, got none", "prompt")
    if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) > MAX_TOKEN_ID:
        raise InvalidRequestError(f"the prompt's token ids must be in [0, {MAX_TOKEN_ID}]", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {request.max_tokens}", "max_tokens")
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt must be shorter than max_model_len={max_model_len} tokens to leave room for an "
            f"answer, got {num_prompt_tokens}; shorten it or set --max-model-len",
            "prompt",
        )
    width = request.sampling_params.beam_width
    if request.sampling_params.use_beam_search and n <= max_num_seqs < width:
        raise InvalidRequestError(
            f"best_of must be at most max_num_seqs={max_num_seqs}, got {width}; lower best_of or set --max-num-seqs",
            "best_of",
        )
    if n > max_num_seqs:
        raise InvalidRequestError(
            f"n must be at most max_num_seqs={max_num_seqs}, got {n}; lower n or set --max-num-seqs", "n"
        )


def check_blocks(
    request: EngineCoreRequest,
    max_model_len: int,
    block_size: int,
    num_usable_blocks: int,
    num_promptable_blocks: int,
) -> None:
    """Checks that each sequence of the request could run to its end, alone if need be.

    Args:
      request: One that check_request let pass.
      max_model_len: Most tokens of a sequence.
      block_size: Tokens a block.
      num_usable_blocks: Of the pool.
      num_promptable_blocks: Those of them that a prompt may take: all but the watermark.

    Raises:
      InvalidRequestError: It could not.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    num_prompt_blocks = cdiv(num_prompt_tokens, block_size)
    if num_prompt_blocks > num_promptable_blocks:
        raise InvalidRequestError(
            f"the prompt ({num_prompt_tokens} tokens) must fit {num_promptable_blocks} of the KV cache's "
            f"{num_usable_blocks} blocks of {block_size} tokens, got {num_prompt_blocks} blocks; shorten it or set "
            "--kv-cache-memory",
            "prompt",
        )
    longest = min(num_prompt_tokens + request.max_tokens, max_model_len)
    num_blocks = cdiv(longest - 1, block_size)  # the last token's keys and values are never needed
    if num_blocks > num_usable_blocks:
        raise InvalidRequestError(
            f"the prompt ({num_prompt_tokens} tokens) and its answer (up to "
            f"{longest - num_prompt_tokens}) must fit the KV cache of {num_usable_blocks} blocks of "
            f"{block_size} tokens, got {num_blocks} blocks; lower max_tokens or set --kv-cache-memory",
            "max_tokens",
        )
