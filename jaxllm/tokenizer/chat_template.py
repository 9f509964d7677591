"""Renders messages through a model's chat template. Doesn't know where it came from; template_sandbox.py limits it."""

from jaxllm.exceptions import InvalidRequestError
from jaxllm.tokenizer.template_sandbox import render
from jaxllm.tokenizer.tokenizer import Tokenizer


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Returns the prompt that the model's chat template makes of a conversation.

    The text holds the special tokens already: encode it with add_special_tokens=False.

    Args:
      messages: Each has a `role` and a `content`, both strings.
      add_generation_prompt: Whether to end with the words that begin the assistant's turn.

    Raises:
      InvalidRequestError: No messages, a malformed one, no template, or the template refuses, fails or takes too much.
    """
    _check_messages(messages)
    if tokenizer.chat_template is None:
        raise InvalidRequestError(
            "this model has no chat template; give plain prompts instead, or a checkpoint that brings one "
            "(chat_template.jinja, tokenizer_config.json or GGUF metadata)",
            "messages",
        )
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": _token_text(tokenizer, tokenizer.bos_token_id),
        "eos_token": _token_text(tokenizer, next(iter(tokenizer.eos_token_ids), None)),
    }
    try:
        return render(tokenizer.chat_template, variables)
    except Exception as error:  # a template may raise whatever Python can
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise InvalidRequestError(f"the model's chat template failed: {reason}", "messages") from error


def _check_messages(messages: list[dict[str, str]]) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message, got none", "messages")
    for index, message in enumerate(messages):
        is_legal = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_legal:
            raise InvalidRequestError(
                f"messages[{index}] must have a string role and a string content, got {message!r:.80}",
                "messages",
            )


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.decode([token_id], skip_special_tokens=False)
