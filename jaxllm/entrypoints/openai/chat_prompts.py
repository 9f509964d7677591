"""Messages of a request -> the prompt that the model's chat template makes of them, off the event loop."""

from collections.abc import Sequence

from jaxllm.engine.async_llm_engine import AsyncLLMEngine
from jaxllm.engine.input_processor import TokensPrompt
from jaxllm.entrypoints.offline_runner import chat_prompt
from jaxllm.entrypoints.openai.protocol import ChatMessage


async def render_prompt(
    engine: AsyncLLMEngine, messages: Sequence[ChatMessage], add_generation_prompt: bool
) -> TokensPrompt:
    """Returns a conversation as a tokenized prompt.

    Raises:
      InvalidRequestError: The model has no chat template, or it refuses the conversation.
      EngineDeadError: The engine has failed, or shuts down.
    """
    plain = [_plain_message(message) for message in messages]
    size = sum(len(message["content"]) for message in plain)
    return await engine.offload(size, chat_prompt, engine.tokenizer, plain, add_generation_prompt)


def _plain_message(message: ChatMessage) -> dict[str, str]:
    """Returns a message as templates know it: text alone. A message without content has an empty one."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain = {"role": message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    return plain
