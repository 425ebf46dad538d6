"""The door: `from chorus import LLM, SamplingParams`. Everything lives in engine/, gateway/, adapters/, tenants/."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import engine

        return getattr(engine, name)
    raise AttributeError(name)
