"""Prompt and sampling parameters in, EngineCoreRequest out: tokenize, check, fill in.

This is the one gate: whatever passes here can't break the engine, and can run, alone if need be. The core may be in
another process, too late to refuse.
"""

import itertools
import operator
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import msgspec

from jaxllm.config import EngineConfig
from jaxllm.exceptions import InvalidRequestError
from jaxllm.messages import EngineCoreRequest, KVCacheInfo
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.admission import Admission
from jaxllm.tokenizer.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A text. Prompts with different cache_salt share no KV cache blocks, however alike they are."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A tokenized prompt. `prompt` is its text, if known: shown in the output, never tokenized."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt


class ProcessedRequest(NamedTuple):
    core_request: EngineCoreRequest
    prompt: str | None  # the prompt's text, None if only token ids were given


class InputProcessor:
    """Makes EngineCoreRequests. Holds no request: its only state is the generator of seeds and a counter.

    May be called by several threads at once. A request must fit the smallest engine core: it may go to any of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        kv_cache_infos: Sequence[KVCacheInfo],
    ) -> None:
        self._vocab_size = config.model.vocab_size
        self._max_model_len = config.scheduler.max_model_len
        self._model_limit = config.model.max_position_embeddings
        self._tokenizer = tokenizer
        self._eos_token_ids = list(eos_token_ids)
        kv_cache_info = min(kv_cache_infos, key=lambda info: info.num_device_blocks)
        self._kv_cache_len = (kv_cache_info.num_device_blocks - 1) * kv_cache_info.block_size
        self._seeds = random.Random(config.seed)
        self._counter = itertools.count()
        self._admission = Admission(config.scheduler, kv_cache_info)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time_s: float,
        priority: int = 0,
    ) -> ProcessedRequest:
        """Returns the request that the engine core understands, and the prompt's text.

        Its id is the caller's and a number: the caller may use his again, the engine core never sees one twice.

        Raises:
          InvalidRequestError: The id, the prompt or a sampling parameter breaks a rule.
        """
        _check_text("request_id", request_id)
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise InvalidRequestError(f"priority must be an integer of 32 bits, got {priority!r:.80}", "priority")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        params = msgspec.structs.replace(params)  # the caller's object may be changed while the request runs
        params.validate()
        for stop in params.stop_strings:
            _check_text("stop", stop)
        self._check_token_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_token_ids("logit_bias", params.logit_bias or ())
        self._check_allowed(params)
        text, ids, cache_salt = _split_prompt(prompt)
        token_ids = self._tokenize(text, ids)
        core_request = EngineCoreRequest(
            request_id=f"{request_id}-{next(self._counter)}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_ids=self._eos_token_ids,
            arrival_time_s=arrival_time_s,
            seed=self._seed_of(params),
            max_tokens=self._clipped_max_tokens(params, len(token_ids)),
            priority=priority,
            cache_salt=cache_salt,
            bad_words_token_ids=self._bad_words_token_ids(params.bad_words or ()),
        )
        self._admission.check(core_request)
        return ProcessedRequest(core_request, text)

    def _tokenize(self, text: str | None, ids: Any) -> list[int]:
        if ids is not None:
            return self._checked_ids(ids)
        assert text is not None
        if not text:
            raise InvalidRequestError("prompt must not be empty", "prompt")
        token_ids = self._tokenizer.encode(text)
        if not token_ids:
            raise InvalidRequestError(f"prompt must hold at least one token, got {text!r:.80}", "prompt")
        return self._checked_ids(token_ids)

    def _checked_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, (list, tuple)):
            raise InvalidRequestError(
                f"prompt_token_ids must be a list of token ids, got {type(ids).__name__}", "prompt_token_ids"
            )
        if not ids:
            raise InvalidRequestError("prompt must not be empty: it has no token ids", "prompt_token_ids")
        self._check_len(len(ids))
        return [self._checked_id(token_id) for token_id in ids]

    def _checked_id(self, token_id: Any) -> int:
        # operator.index takes NumPy's integers as well, and refuses floats.
        try:
            value = None if isinstance(token_id, bool) else operator.index(token_id)
        except TypeError:
            value = None
        if value is None:
            raise InvalidRequestError(f"prompt_token_ids must hold integers, got {token_id!r:.80}", "prompt_token_ids")
        if not 0 <= value < self._vocab_size:
            raise InvalidRequestError(
                f"prompt_token_ids must be in [0, {self._vocab_size}), got {value}", "prompt_token_ids"
            )
        return value

    def _check_len(self, num_tokens: int) -> None:
        if num_tokens < self._max_model_len:
            return
        way_out = "shorten the prompt"
        if self._max_model_len < self._model_limit:
            way_out += f" or raise --max-model-len (this model allows {self._model_limit})"
        raise InvalidRequestError(
            f"prompt must be shorter than max_model_len={self._max_model_len} tokens, to leave room for one "
            f"generated token, got {num_tokens} tokens; {way_out}",
            "prompt",
            "context_length_exceeded",
        )

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidRequestError(
                    f"{name} must hold token ids in [0, {self._vocab_size}), got {token_id}", name
                )

    def _check_allowed(self, params: SamplingParams) -> None:
        if params.allowed_token_ids is None:
            return
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids)
        ending = {*self._eos_token_ids, *(params.stop_token_ids or ())}
        if params.min_tokens and ending.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids must hold a token that ends nothing, as min_tokens bans the others at first; "
                "add one, or set min_tokens to 0",
                "allowed_token_ids",
            )

    def _bad_words_token_ids(self, words: Iterable[str]) -> list[list[int]]:
        """Returns how each word is written at the beginning of a text and after a space."""
        found = []
        for word in words:
            _check_text("bad_words", word)
            for text in (word.lstrip(), " " + word.lstrip()):
                found.append(self._tokenizer.encode(text, add_special_tokens=False))
        return [ids for place, ids in enumerate(found) if ids and ids not in found[:place]]

    def _clipped_max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        room = self._max_model_len - num_prompt_tokens
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        # As far as the model and the KV cache go; the last token's keys and values are never needed.
        return max(min(room, self._kv_cache_len + 1 - num_prompt_tokens), 1)

    def _seed_of(self, params: SamplingParams) -> int:
        if params.seed is None or params.seed == -1:
            return self._seeds.getrandbits(62)  # seed + i stays in int64
        return params.seed


class _PromptParts(NamedTuple):
    """What a prompt says; text or ids, or both, are given."""

    text: str | None
    ids: Any
    cache_salt: str | None


def _split_prompt(prompt: Any) -> _PromptParts:
    if isinstance(prompt, str):
        _check_text("prompt", prompt)
        return _PromptParts(prompt, None, None)
    if isinstance(prompt, (list, tuple)):
        return _PromptParts(None, prompt, None)
    if not isinstance(prompt, dict):
        raise InvalidRequestError(
            f"prompt must be a string, a list of token ids or a dict, got {type(prompt).__name__}", "prompt"
        )
    unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if unknown or text is None and ids is None:
        got = ", ".join(repr(key) for key in prompt) or "no key"
        raise InvalidRequestError(f"a prompt dict needs 'prompt' or 'prompt_token_ids', got {got:.80}", "prompt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None:
            _check_text(name, value)
    if salt == "":
        raise InvalidRequestError("cache_salt must not be empty; leave it out to share the prefix cache", "cache_salt")
    return _PromptParts(text, ids, salt)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} must be a string, got {type(text).__name__}", name)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} must be valid Unicode, got a lone surrogate at character {error.start}", name
        ) from None
