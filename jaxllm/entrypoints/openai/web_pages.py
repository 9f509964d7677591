"""Cross-origin requests: which web pages a browser lets read our answers. Stands in front of the gate."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_SHOWN_HEADERS = ("x-request-id", "openai-processing-ms", "retry-after")


def for_web_pages(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Returns the application with answers for browsers in front, which ask before they send a key; itself if none are
    allowed.

    Args:
      app: The gate.
      allowed_origins: Such as "https://chat.example", or "*" for any.
    """
    if not allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_SHOWN_HEADERS,
    )
