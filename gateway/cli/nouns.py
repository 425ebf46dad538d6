"""Commands on the nouns of administration: each is a small function of what it does. Where the server is, how
the answer is shown, and which fields of a noun can be given as flags, is added here. Knows no noun."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from gateway.cli.admin import AsJson, DataDir, Url, connect, show
from gateway.cli.rest import Rest

Unset = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="FIELD", help="back to null, such as plan or limits.concurrency; repeatable",
                 show_default=False),
]  # fmt: skip


@dataclass(frozen=True)
class Field:
    """A field of a JSON body (`limits.concurrency` is inside limits) as a flag."""

    path: str
    kind: Any = str
    help: str = ""
    flag: str = ""

    @property
    def parameter(self) -> inspect.Parameter:
        name = self.path.replace(".", "_")
        flag = self.flag or "--" + self.path.rpartition(".")[2].replace("_", "-")
        note = typer.Option(flag, help=self.help, show_default=False)
        annotation = Annotated[self.kind | None, note]  # type: ignore[name-defined]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


NUMBERS = ("requests_per_minute", "tokens_per_minute", "concurrency", "tokens_per_day", "tokens_per_month")
LIMITS = (
    *(Field(f"limits.{name}", int) for name in NUMBERS),
    Field("limits.soft", list[str], "budget that lets everything through, repeatable"),
    Field("limits.shadow", list[str], "limit that only tells what it would refuse, repeatable"),
)


@dataclass(frozen=True)
class Door:
    """The admin API, and the terminal."""

    rest: Rest
    as_json: bool

    def show(self, answer: dict[str, Any] | list[dict[str, Any]], columns: tuple[str, ...] = ()) -> None:
        show(answer, self.as_json, columns)

    def call(self, method: str, path: str, body: Any = None) -> None:
        """Calls, and shows the answer."""
        content = {} if body is None else {"json": body}
        self.show(self.rest.call(method, path, **content))

    def list_all(self, path: str, columns: tuple[str, ...]) -> None:
        self.show(self.rest.list_all(path), columns)


def command(
    group: typer.Typer, name: str, fields: Sequence[Field] = (), *, can_unset: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function of (door, own arguments…) or, with `fields`, of (door, body, own arguments…)."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name not in GIVEN]

        def run(url: str | None, data_dir: str | None, as_json: bool, **arguments: Any) -> None:
            door = Door(connect(url, data_dir), as_json)
            flags = {field.path: arguments.pop(field.parameter.name) for field in fields}
            unset = (arguments.pop("unset") or []) if can_unset else []
            given = {"body": body_of(flags, unset)} if fields else {}
            function(door, **given, **arguments)

        added = [field.parameter for field in fields]
        added += [_parameter("unset", Unset)] if can_unset else []
        added += [_parameter("url", Url), _parameter("data_dir", DataDir), _parameter("as_json", AsJson, False)]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *added)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return group.command(name)(run)

    return decorate


GIVEN = ("door", "body")


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def body_of(flags: dict[str, Any], unset: Sequence[str] = ()) -> dict[str, Any]:
    """{"limits.concurrency": 2, "plan": None} → {"limits": {"concurrency": 2}}: what was given at all, and `unset` as
    null."""
    body: dict[str, Any] = {}
    for path, value in (*flags.items(), *((path, UNSET) for path in unset)):
        if value is None or value == []:
            continue
        head, _, inner = path.rpartition(".")
        place = body.setdefault(head, {}) if head else body
        place[inner] = None if value is UNSET else value
    return body


UNSET = object()
