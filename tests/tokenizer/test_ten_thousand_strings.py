"""Token ids, and the texts that they become again, against reference tokenizers, on ten thousand hard strings.

The golden file holds a hash of each hundred; scripts/golden/tokenizer_reference.py says what the references are.
"""

import json
from pathlib import Path

import pytest

from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.tokenizer.loader import open_tokenizer
from tests.fakes.unicode_strings import GROUP_SIZE, NUM_STRINGS, group_hashes, unicode_strings

_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tokenizers.json").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "gemma3-270m"])
def test_ids_and_texts_are_the_references(model: str) -> None:
    tokenizer = open_tokenizer(open_checkpoint(model))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in unicode_strings()]
    texts = [tokenizer.decode(part, skip_special_tokens=False) for part in ids]
    assert len(ids) == NUM_STRINGS == GROUP_SIZE * len(_GOLDEN[model]["ids"])
    assert group_hashes(ids) == _GOLDEN[model]["ids"]
    assert group_hashes(texts) == _GOLDEN[model]["texts"]
