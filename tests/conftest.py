"""What holds for every test: one thread, no deprecated host calls, hardware tests skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from ssr_hf.cache import growth

# At these sizes more threads only wait for each other.
torch.set_num_threads(1)

DEPRECATION_WORDS = ("deprecat", "will be removed", "will be unavailable")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error:.*deprecated:FutureWarning:ssr_hf")
    config.addinivalue_line("markers", "small_caches: attention caches are concatenated")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_device)


@pytest.fixture(autouse=True)
def growing_caches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of tiny models grow in buffers, as those of real models do.

    Tests that are marked `small_caches` take the way that small caches take.
    """
    if request.node.get_closest_marker("small_caches") is None:
        monkeypatch.setattr(growth, "SMALL", 0)
        monkeypatch.setattr(growth, "MINIMUM_SPARE", 6)


class DeprecationCollector(logging.Handler):
    """Keeps what transformers logs about calls that it is going to drop."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(word in text.lower() for word in DEPRECATION_WORDS):
            self.messages.append(text)


@pytest.fixture(autouse=True)
def no_deprecated_host_calls() -> Iterator[None]:
    """Fails a test during which transformers logged a deprecation: its next release would break."""
    collector = DeprecationCollector()
    host_logger = logging.getLogger("transformers")
    host_logger.addHandler(collector)
    try:
        yield
    finally:
        host_logger.removeHandler(collector)
    assert not collector.messages, f"transformers deprecates: {collector.messages}"
