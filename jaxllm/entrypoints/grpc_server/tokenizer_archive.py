"""The tokenizer as a zip archive of the files that others load tokenizers from, for gateways that tokenize."""

import io
import json
import zipfile

from jaxllm.tokenizer.tokenizer import Tokenizer

_TIME = (1980, 1, 1, 0, 0, 0)  # the same tokenizer makes the same archive


def build_archive(tokenizer: Tokenizer) -> bytes:
    """Returns the archive: the tokenizer's own files and tokenizer_config.json."""
    files = tokenizer.files()
    config = {
        "tokenizer_class": "LlamaTokenizer" if "tokenizer.model" in files else "PreTrainedTokenizerFast",
        "bos_token": _token_text(tokenizer, tokenizer.bos_token_id),
        "eos_token": _token_text(tokenizer, next(iter(tokenizer.eos_token_ids), None)),
        "chat_template": tokenizer.chat_template,
    }
    present = {key: value for key, value in config.items() if value is not None}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, "tokenizer_config.json": json.dumps(present).encode()}.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return buffer.getvalue()


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.decode([token_id], skip_special_tokens=False)
