"""Runs a list of prompts to the end on one LLMEngine. `LLM` and the generate command share it."""

import itertools
from collections.abc import Callable, Sequence

from jaxllm.engine.input_processor import Prompt, TokensPrompt
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.tokenizer.chat_template import render_chat
from jaxllm.tokenizer.tokenizer import Tokenizer

OnOutputs = Callable[[list[RequestOutput]], None]


class OfflineRunner:
    """Adds requests, steps the engine until all have finished, and returns them in input order."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._counter = itertools.count()

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        on_outputs: OnOutputs,
        is_streaming: bool = False,
    ) -> list[RequestOutput]:
        """Returns one finished output a prompt.

        `on_outputs` gets them as well, each after the step that finished it; with `is_streaming` it also gets what
        the steps before have changed. Whatever stops it (a bad prompt, Ctrl-C) leaves no request of its own
        behind.

        Raises:
          InvalidRequestError: A prompt breaks a rule; the message says which, and none is answered.
          EngineDeadError: The engine has failed.
        """
        ids = [str(next(self._counter)) for _ in prompts]
        try:
            self._add(ids, prompts, params, final_only=not is_streaming)
            return self._run_to_end(ids, on_outputs)
        except BaseException:
            self._engine.abort_request(ids)
            raise

    def _add(
        self, ids: Sequence[str], prompts: Sequence[Prompt], params: Sequence[SamplingParams], final_only: bool
    ) -> None:
        for index, request_id in enumerate(ids):
            try:
                self._engine.add_request(request_id, prompts[index], params[index], final_only=final_only)
            except InvalidRequestError as error:
                if len(ids) == 1:
                    raise
                raise InvalidRequestError(f"prompt {index + 1} of {len(ids)}: {error}", error.param) from error

    def _run_to_end(self, ids: Sequence[str], on_outputs: OnOutputs) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        own = set(ids)
        while len(done) < len(ids):
            # An earlier run that was stopped may have left aborted outputs to be given out.
            outputs = [output for output in self._engine.step() if output.request_id in own]
            done.update((output.request_id, output) for output in outputs if output.finished)
            on_outputs(outputs)
        return [done[request_id] for request_id in ids]


def chat_prompt(
    tokenizer: Tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True
) -> TokensPrompt:
    """Returns a conversation as the prompt that the model's chat template makes of it.

    Raises:
      InvalidRequestError: `messages` is no conversation, or the model has no chat template for it.
    """
    text = render_chat(tokenizer, messages, add_generation_prompt)
    # The template writes its own beginning-of-sequence token.
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
