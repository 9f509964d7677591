"""SentencePieceTokenizer: texts and token ids by the `sentencepiece` library, with special and added tokens around it.

The library knows pieces; it finds no special tokens in a text, and has none beyond its own. Doesn't know where the
model came from: folder_tokenizer.py and gguf_vocabulary.py do.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence

import sentencepiece
import tokenizers

from jaxllm.tokenizer.sentencepiece_model import SPACE, read_rules, without_prefix
from jaxllm.tokenizer.tokenizer import check_unicode

_EACH_BYTE = "jaxllm.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Broken bytes become U+FFFD one by one, as in the library."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class SentencePieceTokenizer:
    """Implements Tokenizer on sentencepiece.SentencePieceProcessor.

    Args:
      model: A serialized model, checked by read_rules().
      special: Text -> id of tokens that skip_special_tokens leaves out, beside the model's own control pieces; all are
        found in texts.
      added: Text -> id of the other tokens that are found in texts before they are split.
      before, after: Ids that add_special_tokens puts around a text.
      prefixes_parts: Whether each part between special tokens gets the space that the model puts before texts, or the
        first alone.

    Raises:
      Exception: The library refuses the model; it has no class of its own for that.
    """

    def __init__(
        self,
        model: bytes,
        *,
        special: Mapping[str, int],
        added: Mapping[str, int],
        before: Sequence[int],
        after: Sequence[int],
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        prefixes_parts: bool = True,
    ) -> None:
        rules = read_rules(model)
        self._model = model
        self._processor = _load(model)
        needs_other = rules.adds_prefix and not prefixes_parts
        self._later_processor = _load(without_prefix(model)) if needs_other else self._processor
        self._before, self._after = list(before), list(after)
        self._removes_spaces = rules.removes_spaces
        self._strips_prefix = rules.adds_prefix or rules.removes_spaces
        special = {**_control_pieces(self._processor), **special}
        self._found = _TokenFinder({**added, **special})
        self._texts, self._begins_with_space = _piece_texts(self._processor, rules.unknown_text)
        self.special_token_ids = frozenset(special.values())
        self.vocab_size = max([len(self._texts) - 1, *special.values(), *added.values()]) + 1
        self._texts += [b""] * (self.vocab_size - len(self._texts))
        for text, token_id in {**added, **special}.items():
            self._texts[token_id] = text.encode()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        check_unicode(text)
        ids = list(self._before) if add_special_tokens else []
        processor = self._processor
        for part in self._found.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += processor.encode(part)
            processor = self._later_processor
        return ids + self._after if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in ids if 0 <= token_id < self.vocab_size and token_id not in skipped]
        text = b"".join([self._texts[token_id] for token_id in shown]).decode("utf-8", _EACH_BYTE)
        return text[self._num_spaces_before(shown) :] if self._strips_prefix else text

    def _num_spaces_before(self, ids: Sequence[int]) -> int:
        """Returns how many of the text's first spaces stand there only because texts begin with one."""
        count = 0
        for token_id in ids:
            if token_id not in self._begins_with_space:
                break
            count += 1
            if not self._removes_spaces or len(self._texts[token_id]) > 1:
                break
        return count

    def files(self) -> dict[str, bytes]:
        """Returns what other programs load this tokenizer from: file name -> content."""
        return {"tokenizer.model": self._model}


class _TokenFinder:
    """Finds tokens in a text by the automaton of the `tokenizers` library: leftmost first, then longest."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._ids = [token_id for text, token_id in tokens.items() if text]
        # A model of one word, which all text between the tokens is taken for.
        self._finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in tokens if text])

    def split(self, text: str) -> Iterator[str | int]:
        """Yields the text's parts: token ids, and what lies between them."""
        if not self._ids or not text:
            yield from [text] if text else []
            return
        found = self._finder.encode_batch([text])[0]  # the batch form lets other threads run
        for index, (start, end) in zip(found.ids, found.offsets, strict=True):
            yield self._ids[index - 1] if index else text[start:end]


def pieces_of(model: bytes) -> dict[str, int]:
    """Returns piece -> id of a serialized model, read_rules() having checked it."""
    processor = _load(model)
    return {piece: token_id for token_id, piece in enumerate(processor.id_to_piece(_ids(processor)))}


def _load(model: bytes) -> sentencepiece.SentencePieceProcessor:
    if not model:  # the library would take that for "later"
        raise ValueError("it is empty")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _ids(processor: sentencepiece.SentencePieceProcessor) -> list[int]:
    return list(range(processor.get_piece_size()))


def _control_pieces(processor: sentencepiece.SentencePieceProcessor) -> dict[str, int]:
    is_control = processor.is_control(_ids(processor))
    return {processor.id_to_piece(token_id): token_id for token_id, control in enumerate(is_control) if control}


def _piece_texts(
    processor: sentencepiece.SentencePieceProcessor, unknown_text: str
) -> tuple[list[bytes], frozenset[int]]:
    """Returns each piece's text, and the ids of those that begin with a space."""
    ids = _ids(processor)
    pieces = processor.id_to_piece(ids)
    texts = [piece.replace(SPACE, " ").encode() for piece in pieces]
    begins_with_space = frozenset(token_id for token_id in ids if pieces[token_id].startswith(SPACE))
    for token_id, is_byte in enumerate(processor.is_byte(ids)):
        if is_byte:
            texts[token_id] = bytes([int(pieces[token_id][3:-1], 16)])  # <0x41>
    for token_id, is_unknown in enumerate(processor.is_unknown(ids)):
        if is_unknown:
            texts[token_id] = unknown_text.encode()
    return texts, begins_with_space
