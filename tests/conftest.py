"""Fixtures that several packages' tests share."""

from pathlib import Path

import hypothesis
import pytest

from jaxllm.model_loader import demo_models

# Shared machines are slow at odd moments; a deadline would measure those.
hypothesis.settings.register_profile("jaxllm", deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxllm")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real default model, fetched on the first run as a user's machine would."""
    return demo_models.fetch("smollm2")
