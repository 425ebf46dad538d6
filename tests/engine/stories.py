"""Stories: random traffic for a rig: requests, numbers of steps, and whatever else a test wants to happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine.protocol import Generate
from tests.engine.rig import Rig, adapter, prompt


@dataclass(frozen=True)
class Ask:
    """A request; `family` and `length` say its prompt."""

    length: int
    family: int
    tokens: int
    priority: int = 1
    n: int = 1
    adapter: int | None = None
    ephemeral: bool = False
    owner: bytes = b""


def tell(rig: Rig, story: Iterable[object], act: Callable[[Any], None] | None = None) -> list[Generate]:
    """To its end, when nothing is left to do. `act` does what is neither a request nor a number of steps."""
    requests = []
    for index, action in enumerate(story):
        match action:
            case Ask():
                requests.append(ask(rig, str(index), action))
            case int():
                for _ in range(action):
                    rig.step()
            case _:
                assert act is not None
                act(action)
    rig.run()
    rig.assert_idle()
    return requests


def ask(rig: Rig, id: str, one: Ask) -> Generate:
    """It is not ended by any token."""
    more = {"n": one.n, "priority": one.priority, "ephemeral": one.ephemeral, "owner": one.owner}
    ref = None if one.adapter is None else adapter(one.adapter)
    return rig.add(id, prompt(one.length, one.family), ref, max_tokens=one.tokens, ignore_eos=True, **more)
