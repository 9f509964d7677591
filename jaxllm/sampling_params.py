"""SamplingParams and the one validator that every door uses: Python, CLI, HTTP and gRPC."""

import math
from typing import Any, Literal

import msgspec

from jaxllm.exceptions import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKENS = 1024
MAX_BAD_WORDS = 256
MIN_REPETITION_PENALTY = 0.01  # within these, the divisor of a float32 logit stays far from 0 and infinity
MAX_REPETITION_PENALTY = 100.0
MAX_BEAM_WIDTH = 16  # the device reports twice as many candidates for each beam
MAX_LENGTH_PENALTY = 10.0  # in either direction: lengths to this power stay far inside a float
_GREEDY_BELOW = 1e-5  # temperatures below this mean "take the most likely token"
_MIN_TEMPERATURE = 0.01  # positive temperatures below this are raised to it
_INT32_MAX = 2**31 - 1


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How the tokens of one request are chosen and when they end. Fields are named as in vLLM.

    Attributes:
      n: Number of sequences to generate for the prompt, 1 to 128.
      temperature: Divides the logits. 0 (below 1e-5) is greedy; values below 0.01 act as 0.01.
      top_p: Smallest set of tokens whose probabilities sum to at least this, in (0, 1].
      top_k: Number of most likely tokens to keep; 0 or -1 keeps all.
      min_p: Least probability to keep, as a share of the most likely token's, in [0, 1].
      seed: Makes the draws repeatable, whatever else runs beside them; sequence i draws from seed + i.
        None and -1 draw a fresh seed.
      stop: String or strings that end a sequence. The text is cut before it.
      stop_token_ids: Token ids that end a sequence.
      ignore_eos: Whether to go on after the model's end-of-sequence token.
      max_tokens: Most tokens to generate; None fills up to max_model_len.
      logprobs: Number of most likely tokens to report at each generated position, 0 to 20 (the sampled
        token is always among them); None reports nothing.
      prompt_logprobs: The same for each prompt position; the first has none.
      min_tokens: Tokens to generate before an end-of-sequence or stop token may come or a stop string ends anything.
      presence_penalty: Subtracted from the logits of tokens that have been generated, in [-2, 2].
      frequency_penalty: The same, times how often they have been, in [-2, 2].
      repetition_penalty: Divides positive logits of tokens of the prompt and of generated ones, and multiplies others,
        in [0.01, 100]; 1 changes nothing.
      logit_bias: Token id -> what is added to that token's logit before it is drawn, in [-100, 100]; at most 1024
        tokens.
      allowed_token_ids: The only tokens that may come, 1 to 1024. Where min_tokens bans some of them, others must be
        left.
      bad_words: Texts that must not be generated, at most 256, each of 1 to 256 characters: a token that would complete
        one isn't drawn. With allowed_token_ids they give way where nothing else is left.
        Reported log probabilities are those of the raw logits, without any of these.
      detokenize: Whether to make text; False leaves `text` empty.
      skip_special_tokens: Whether special tokens are left out of the text.
      include_stop_str_in_output: Whether the stop string stays in the text.
      use_beam_search: Whether to keep the best_of most likely sequences at each step and return the n best.
        Needs temperature 0, top_p 1, all of top_k and no stop strings. Nothing can be shown before the end.
      best_of: Beam width, from n to 16; None is n. Without beam search it must be None or n.
      length_penalty: Beams are ranked by log probability / generated tokens ** length_penalty, in [-10, 10].
      early_stopping: When a beam search ends: True, when best_of sequences have finished; False, when moreover the
        best running beam scores no better as it stands; "never", when it couldn't do so at its best length either.

    Raises:
      InvalidRequestError: A field breaks its rule.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        self.validate()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def effective_temperature(self) -> float:
        """The divisor that the sampler uses; 0 means greedy."""
        return 0.0 if self.is_greedy else max(self.temperature, _MIN_TEMPERATURE)

    @property
    def beam_width(self) -> int:
        """Beams that a beam search keeps at each step."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def validate(self) -> None:
        """Checks every field. Called at construction, and again when a request is added.

        Raises:
          InvalidRequestError: A field breaks its rule.
        """
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, lambda value: value >= 0, "at least 0")
        _check_float("top_p", self.top_p, lambda value: 0 < value <= 1, "in (0, 1]")
        _check_int("top_k", self.top_k, -1, _INT32_MAX)
        _check_float("min_p", self.min_p, lambda value: 0 <= value <= 1, "in [0, 1]")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        self._validate_flags()
        self._validate_stops()
        self._validate_penalties()
        self._validate_logit_bias()
        self._validate_allowed_and_bad()
        self._validate_beams()
        if self.n > 1 and self.is_greedy and not self.use_beam_search:
            raise InvalidRequestError(
                f"n must be 1 when temperature is 0, got n={self.n}: greedy sequences are all alike; "
                "set temperature above 0",
                "n",
            )

    def _validate_flags(self) -> None:
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "use_beam_search",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)

    def _validate_beams(self) -> None:
        _check_float(
            "length_penalty",
            self.length_penalty,
            lambda value: abs(value) <= MAX_LENGTH_PENALTY,
            f"in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]",
        )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", got {self.early_stopping!r:.80}', "early_stopping"
            )
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, MAX_N)
            if self.best_of < self.n:
                raise InvalidRequestError(f"best_of must be at least n={self.n}, got {self.best_of}", "best_of")
        rules = self._rules_with_beams() if self.use_beam_search else self._rules_without_beams()
        for name, is_kept, rule in rules:
            if not is_kept:
                raise InvalidRequestError(f"{name} must be {rule}, got {getattr(self, name)!r:.80}", name)

    def _rules_with_beams(self) -> list[tuple[str, bool, str]]:
        width_name = "n" if self.best_of is None else "best_of"
        return [
            (width_name, self.beam_width <= MAX_BEAM_WIDTH, f"at most {MAX_BEAM_WIDTH} with use_beam_search"),
            ("temperature", self.is_greedy, "0 with use_beam_search"),
            ("top_p", self.top_p == 1, "1 with use_beam_search"),
            ("top_k", self.top_k <= 0, "0 or -1 with use_beam_search"),
            ("min_p", self.min_p == 0, "0 with use_beam_search"),
            ("stop", not self.stop_strings, "None with use_beam_search (stop_token_ids may be given)"),
            ("min_tokens", self.min_tokens == 0, "0 with use_beam_search"),
            ("presence_penalty", self.presence_penalty == 0, "0 with use_beam_search"),
            ("frequency_penalty", self.frequency_penalty == 0, "0 with use_beam_search"),
            ("repetition_penalty", self.repetition_penalty == 1, "1 with use_beam_search"),
            ("logit_bias", not self.logit_bias, "None with use_beam_search"),
            ("allowed_token_ids", self.allowed_token_ids is None, "None with use_beam_search"),
            ("bad_words", not self.bad_words, "None with use_beam_search"),
        ]

    def _rules_without_beams(self) -> list[tuple[str, bool, str]]:
        return [
            ("best_of", self.best_of in (None, self.n), "None or n without use_beam_search"),
            ("length_penalty", self.length_penalty == 1, "1.0 without use_beam_search"),
            ("early_stopping", self.early_stopping is False, "False without use_beam_search"),
        ]

    def _validate_penalties(self) -> None:
        _check_int("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}", "min_tokens"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), lambda value: abs(value) <= 2, "in [-2, 2]")
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            lambda value: MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
            f"in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]",
        )

    def _validate_allowed_and_bad(self) -> None:
        ids = self.allowed_token_ids
        if ids is not None:
            if not isinstance(ids, (list, tuple)) or not 0 < len(ids) <= MAX_ALLOWED_TOKENS:
                raise InvalidRequestError(
                    f"allowed_token_ids must be a list of 1 to {MAX_ALLOWED_TOKENS} token ids", "allowed_token_ids"
                )
            for token_id in ids:
                _check_int("allowed_token_ids", token_id, 0, _INT32_MAX)
        words = [] if self.bad_words is None else self.bad_words
        if not isinstance(words, (list, tuple)) or len(words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"bad_words must be a list of at most {MAX_BAD_WORDS} strings", "bad_words")
        for word in words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_STOP_CHARS or not word.strip():
                raise InvalidRequestError(
                    f"each of bad_words must be a string of 1 to {MAX_STOP_CHARS} characters, not all of them blank, "
                    f"got {word!r:.80}",
                    "bad_words",
                )

    def _validate_logit_bias(self) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS_TOKENS:
            raise InvalidRequestError(
                f"logit_bias must map at most {MAX_LOGIT_BIAS_TOKENS} token ids to numbers", "logit_bias"
            )
        for token_id, value in bias.items():
            _check_int("logit_bias", token_id, 0, _INT32_MAX)
            _check_float(
                "logit_bias",
                value,
                lambda number: abs(number) <= MAX_LOGIT_BIAS,
                f"in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]",
            )

    def _validate_stops(self) -> None:
        if not isinstance(self.stop, (str, list, tuple, type(None))):
            raise InvalidRequestError(f"stop must be a string or a list of strings, got {self.stop!r}", "stop")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(stops)}", "stop")
        for stop in stops:
            if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters, got {stop!r:.80}",
                    "stop",
                )
        if stops and not self.detokenize:
            raise InvalidRequestError("stop needs detokenize=True: stop strings are searched in the text", "stop")
        ids = self.stop_token_ids or []
        if not isinstance(ids, (list, tuple)) or len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids", "stop_token_ids"
            )
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, _INT32_MAX)


class BeamSearchParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What `LLM.beam_search` does. Fields are named as in vLLM.

    Attributes:
      beam_width: Beams to keep at each step, and sequences to return, 1 to 16.
      max_tokens: Most tokens to generate.
      ignore_eos: Whether beams go on after the model's end-of-sequence token.
      temperature: Must be 0.
      length_penalty: As in SamplingParams.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def to_sampling_params(self) -> SamplingParams:
        """Returns the request's parameters. It ends only when no running beam could reach the best ones.

        Raises:
          InvalidRequestError: A field breaks its rule.
        """
        _check_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping="never",
            detokenize=False,
        )


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r:.80}", name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", name)


def _check_float(name: str, value: Any, is_legal: Any, rule: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, got {value!r:.80}", name)
    if not math.isfinite(value) or not is_legal(value):
        raise InvalidRequestError(f"{name} must be {rule}, got {value}", name)
