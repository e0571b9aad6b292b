"""Serves DeepSeek-V4.1-Flash on GPUs and CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.llm import LLM
    from deepinfer.request import RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "deepinfer.engine.llm",
    "RequestOutput": "deepinfer.request",
    "SamplingParams": "deepinfer.request",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import a public name on first use, because planning code imports this package without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
