"""Ten thousand strings that tokenizers find hard, the same ones on every machine; no two share a generator's state.

Only characters that Unicode 13 had already are drawn, and those that no version will ever assign: the regular
expressions of different libraries know different versions. tests/tokenizer and scripts/golden share them.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random

NUM_STRINGS = 10_000
GROUP_SIZE = 100

_SCRIPTS = (
    (0x20, 0x7E), (0xA1, 0x17F), (0x370, 0x373), (0x391, 0x3A1), (0x3B1, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA),
    (0x620, 0x64A), (0x905, 0x939), (0xE01, 0xE30), (0x10A0, 0x10C5), (0x1E00, 0x1EFF), (0x3041, 0x3096),
    (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xFF01, 0xFF5E), (0x10300, 0x1031F), (0x12000, 0x1236E),
    (0x1D400, 0x1D454), (0x20000, 0x2A6D6), (0x30000, 0x3134A), (0xE0020, 0xE007E), (0xF0000, 0xF00FF),
    (0x100000, 0x10FFFD),
)  # fmt: skip
_MARKS = ((0x300, 0x36F), (0x591, 0x5BD), (0x64B, 0x652), (0x93E, 0x94D), (0xE31, 0xE3A), (0x1AB0, 0x1ABE),
          (0x20D0, 0x20DC), (0xFE00, 0xFE0F), (0x1D165, 0x1D169))  # fmt: skip
_NUMBERS = (
    "0123456789",
    "٠١٢٣٤٥٦٧٨٩",
    "०१२३४५६७८९",
    "０１２３４５６７８９",
    "²³¹¼½¾",
    "ⅠⅡⅢⅷ",
    "①②③",
    "一二三",
    "𝟎𝟏𝟐",
    "𐄇𐄈",
)
_SPACES = (" ", " ", " ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", "\x0b", "\x0c", "\x85", "\xa0", "\u1680", "\u2003",
           "\u2028", "\u2029", "\u202f", "\u3000", "\u200b", "\u2060", "\ufeff", "\u180e")  # fmt: skip
_CONTROLS = tuple(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0xAD, 0x200E, 0x200F, 0x202A, 0x202E, 0x2066, 0xFFF9]))
_NEVER = ("\ufdd0", "\ufffe", "\uffff", "\ufffd", "\U0001ffff", "\U0010ffff", "\ue000", "\uf8ff")
_EMOJI = ("😀", "👩‍🚀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇫🇷", "🇫", "1️⃣", "#️⃣", "❤️", "☺", "🙃", "\u200d", "\ufe0f", "🏴󠁧󠁢󠁥󠁮󠁧󠁿")
_WORDS = ("the", "The", " capital", "of", "don't", "I'LL", "we've", "'s", "'S", "isn’t", "naïve", "e\u0301",
          "HTTPServer", "snake_case", "x=1;", "}\n\n}",
          "https://a.b/c?d=e&f", "C++", "3.14", "1,000,000", "$5", "¿qué?", "...", "——",
          "ﬁ", "Å", "K", "ß", "İ", "ǆ", "\ufb01n", "日本語", "한국어", "שלום", "مرحبا", "ไทย", "हिन्दी")  # fmt: skip
_MARKUP = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<bos>", "<eos>", "<unk>", "<pad>", "▁",
           "▁▁a", "<0x0A>", "<0x41>", "<start_of_turn>", "<unused7>", "[multimodal]", "Ġ", "Ċ", "<|im_start",
           "##ing")  # fmt: skip


def unicode_strings(count: int = NUM_STRINGS, seed: int = 20) -> Iterator[str]:
    """Yields the strings, of one to some hundred characters; a few are runs of thousands."""
    for index in range(count):
        rng = Random(f"{seed}/{index}")
        yield "".join(_part(rng) for _ in range(1 + _below(rng, 12)))[:4000]


def group_hashes(outputs: Sequence[object]) -> list[str]:
    """Returns a short hash of each GROUP_SIZE outputs, which JSON must be able to hold."""
    groups = (outputs[start : start + GROUP_SIZE] for start in range(0, len(outputs), GROUP_SIZE))
    return [hashlib.sha256(json.dumps(list(group)).encode()).hexdigest()[:12] for group in groups]


def _below(rng: Random, limit: int) -> int:
    """Drawn with random() alone, whose numbers no version of Python has changed."""
    return int(rng.random() * limit)


def _pick(rng: Random, choices: Sequence[str]) -> str:
    return choices[_below(rng, len(choices))]


def _from_ranges(rng: Random, ranges: Sequence[tuple[int, int]], count: int) -> str:
    first, last = ranges[_below(rng, len(ranges))]
    return "".join(chr(first + _below(rng, last - first + 1)) for _ in range(count))


def _run(rng: Random) -> str:
    unit = _pick(rng, (" ", "a", "\n", "\t", "=", "0", "é", "日", "👍", "ab", "\u0301", "▁", ".", "-", "aA"))
    return unit * (2 + _below(rng, 40) if rng.random() < 0.98 else 500 + _below(rng, 3000))


def _marked(rng: Random) -> str:
    return "".join(
        _from_ranges(rng, _SCRIPTS[:16], 1) + _from_ranges(rng, _MARKS, 1 + _below(rng, 3))
        for _ in range(1 + _below(rng, 4))
    )


def _anything(rng: Random) -> str:
    """Any planes' characters, of the ranges above, one by one."""
    return "".join(_from_ranges(rng, _SCRIPTS + _MARKS, 1) for _ in range(1 + _below(rng, 8)))


_PARTS: tuple[Callable[[Random], str], ...] = (
    lambda rng: _pick(rng, _WORDS),
    lambda rng: _pick(rng, _WORDS) + _pick(rng, _SPACES),
    lambda rng: " " + _from_ranges(rng, _SCRIPTS, 1 + _below(rng, 8)),
    lambda rng: "".join(_pick(rng, _pick(rng, _NUMBERS)) for _ in range(1 + _below(rng, 6))),
    lambda rng: "".join(_pick(rng, _SPACES) for _ in range(1 + _below(rng, 5))),
    lambda rng: "".join(_pick(rng, _EMOJI) for _ in range(1 + _below(rng, 3))),
    lambda rng: _from_ranges(rng, _SCRIPTS[:1], 1 + _below(rng, 12)),
    lambda rng: _pick(rng, _CONTROLS),
    lambda rng: _pick(rng, _NEVER),
    lambda rng: _pick(rng, _MARKUP),
    _marked,
    _anything,
    _run,
)


def _part(rng: Random) -> str:
    return _PARTS[_below(rng, len(_PARTS))](rng)
