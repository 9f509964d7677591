"""ServerExecutor: writes a known text with characters of one to four bytes; log probabilities tell their place.

config = fake_config("tests.fakes.server_executor:ServerExecutor")
"""

from jaxllm.config import EngineConfig
from jaxllm.messages import SampledToken, TokenLogprobs
from tests.fakes.fake_executor import FakeExecutor, Row

TEXT = "Héllo, wörld! 😀 is a grin; 漢字 are signs. "


def expected_text(num_tokens: int, shift: int = 0) -> str:
    """Returns what num_tokens bytes of the text make; half a character at the end reads as one U+FFFD."""
    rotated = _rotated(shift)
    data = (rotated * (num_tokens // len(rotated) + 1))[:num_tokens]
    return data.decode("utf-8", errors="replace")


class ServerExecutor(FakeExecutor):
    """Greedy requests write TEXT round and round, a byte a token; others begin `seed % 7` characters later.

    Token i of an answer has log probability -i / 8, and the letters a, b, c, ... are the likeliest beside it. For beams
    these letters are all there is.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            candidates=lambda token_ids: {ord("a") + number: -1.0 - number / 8 for number in range(26)},
            num_blocks=config.cache.num_gpu_blocks_override or 4097,
            block_size=16,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )

    def _draw_token(self, row: Row, seed: int) -> SampledToken:
        params = row.sampling_params
        rotated = _rotated(0 if params.is_greedy else seed % 7)
        index = len(row.token_ids) - row.num_prompt_tokens
        token_id = rotated[index % len(rotated)]
        if params.logprobs is None:
            return SampledToken(token_id)
        others = [ord("a") + number for number in range(params.logprobs)]
        scores = [-(number + 1) / 4 for number in range(params.logprobs)]
        return SampledToken(token_id, TokenLogprobs(-index / 8, 30, others, scores))


def _rotated(shift: int) -> bytes:
    return (TEXT[shift:] + TEXT[:shift]).encode()
