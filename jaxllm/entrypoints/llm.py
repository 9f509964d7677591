"""LLM: offline batched inference, as in vLLM. One call, many prompts, results in input order."""

import dataclasses
import difflib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, cast

from jaxllm.engine.input_processor import Prompt
from jaxllm.engine.llm_engine import DEFAULT_ENGINE_PROCESS, EngineProcess, LLMEngine
from jaxllm.engine_args import DEFAULT_MODEL, EngineArgs
from jaxllm.entrypoints.offline_runner import OfflineRunner, chat_prompt
from jaxllm.entrypoints.progress import ProgressBar
from jaxllm.exceptions import ConfigError, InvalidRequestError
from jaxllm.model_loader.generation_config import sampling_defaults
from jaxllm.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.tokenizer.tokenizer import Tokenizer

Messages = list[dict[str, str]]


class LLM:
    """A model, loaded and ready.

    Example:
      with LLM(model="smollm2") as llm:
          outputs = llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95))
          print(outputs[0].outputs[0].text)

    Args:
      model: The default model's name, a .gguf file, a Hugging Face directory, or a hub id.
      engine_process: Where the engine runs. "mp", the default: in a process of its own, which takes no more processor
        time, works while this one turns tokens into text, and gives all of the device's memory back at shutdown.
        "inproc": in this one, for debuggers and profilers, and where this process holds the device already.
      **engine_args: Any other field of EngineArgs.

    Raises:
      ConfigError: An engine argument breaks a rule.
      ModelLoadError: The model can't be found, read or run.
      DeviceError: A device can't be used.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, engine_process: EngineProcess = DEFAULT_ENGINE_PROCESS, **engine_args: Any
    ) -> None:
        _check_names(engine_args)
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **engine_args), engine_process)
        self._runner = OfflineRunner(self.llm_engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates text for each prompt; many prompts at once are much faster than one after another.

        Args:
          prompts: A prompt, or a list of them. A prompt is text, a list of token ids, {"prompt": text} or
            {"prompt_token_ids": ids}. A dict may also hold "cache_salt": prompts with different salts share no
            blocks of the KV cache.
          sampling_params: One for all prompts, or one a prompt. None takes `get_default_sampling_params()`.
          use_tqdm: Whether to show a progress bar on stderr.

        Returns:
          One finished output a prompt, in input order.

        Raises:
          InvalidRequestError: A prompt or a parameter breaks a rule; no prompt is answered then.
          EngineDeadError: The engine has failed.
        """
        prompt_list = _prompt_list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params_list = _params_list(params, len(prompt_list))
        with ProgressBar(len(prompt_list), disable=not use_tqdm) as progress:
            return self._runner.run(prompt_list, params_list, progress.update)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of conversations, by the model's chat template.

        Args:
          messages: A list of {"role": ..., "content": ...}, or a list of such lists.
          sampling_params: As in `generate`.
          use_tqdm: Whether to show a progress bar on stderr.
          add_generation_prompt: Whether the prompt ends where the assistant's answer begins.

        Returns:
          One finished output a conversation, in input order.

        Raises:
          InvalidRequestError: A message or a parameter breaks a rule, or the model has no chat template.
          EngineDeadError: The engine has failed.
        """
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
        is_one = not messages or isinstance(messages[0], dict)
        conversations = [messages] if is_one else messages
        tokenizer = self.get_tokenizer()
        prompts = [chat_prompt(tokenizer, cast(Messages, one), add_generation_prompt) for one in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Finds the most likely sequences for each prompt, the best of them first.

        Args:
          prompts: As in `generate`.
          params: Width and length of the search.
          use_tqdm: Whether to show a progress bar on stderr.

        Returns:
          One output a prompt, in input order, of beam_width sequences (fewer only if the vocabulary has no more).

        Raises:
          InvalidRequestError: A prompt or a parameter breaks a rule; no prompt is answered then.
          EngineDeadError: The engine has failed.
        """
        outputs = self.generate(prompts, params.to_sampling_params(), use_tqdm)
        tokenizer = self.get_tokenizer()
        return [
            BeamSearchOutput([_beam_sequence(tokenizer, output, sequence) for sequence in output.outputs])
            for output in outputs
        ]

    def get_tokenizer(self) -> Tokenizer:
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's own generation_config sets, and our defaults for the rest."""
        return SamplingParams(**sampling_defaults(self.llm_engine.config.generation_config))

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix. Returns False, and does nothing, while a request runs."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the device. A second call does nothing."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def _beam_sequence(tokenizer: Tokenizer, output: RequestOutput, sequence: CompletionOutput) -> BeamSearchSequence:
    is_stopped = sequence.finish_reason == "stop"
    generated = sequence.token_ids[:-1] if is_stopped else sequence.token_ids
    tokens = [*output.prompt_token_ids, *generated]
    assert sequence.cumulative_logprob is not None
    return BeamSearchSequence(tokens, sequence.cumulative_logprob, tokenizer.decode(tokens), sequence.finish_reason)


def _check_names(engine_args: dict[str, Any]) -> None:
    known = [item.name for item in dataclasses.fields(EngineArgs)]
    for name in engine_args:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown engine argument {name}; {hint}")


def _prompt_list(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts; a list of integers is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}")
    if not prompts:
        raise InvalidRequestError("prompts must not be empty: give at least one prompt", "prompts")
    if isinstance(prompts[0], (str, dict, list, tuple)):
        return list(prompts)
    return [list(prompts)]


def _params_list(params: Any, num_prompts: int) -> list[SamplingParams]:
    if not isinstance(params, (list, tuple)):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"sampling_params must be one, or one a prompt, got {len(params)} for {num_prompts} prompts",
            "sampling_params",
        )
    return list(params)
