"""English prose that is wherever Python is: the paragraphs of its language reference, as `help()` shows them.

It comes with each Python under Python's own licence, so nothing of it is copied here; it differs a little from one
Python to the next.
"""

import re
from pydoc_data.topics import topics

_MIN_CHARACTERS = 250
_NOT_PROSE = re.compile(r"^\s|::|[`*=\\]|>>>")  # markup and code


def english_text() -> str:
    """Returns some 75,000 characters, a paragraph a line."""
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n".join(
        " ".join(paragraph.split())
        for paragraph in paragraphs
        if len(paragraph) > _MIN_CHARACTERS and not _NOT_PROSE.search(paragraph)
    )
