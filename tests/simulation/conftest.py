"""The small model of the engine's tests."""

from tests.offloading.conftest import qwen  # noqa: F401
