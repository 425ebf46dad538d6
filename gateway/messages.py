"""The messages of a chat as clients send them; text only. Body: how all bodies of the OpenAI routes are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from gateway.errors import UNKNOWN_PART, bad_request


class Body(BaseModel):
    """Exact types, no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


def _kind(part: Any) -> str | None:
    """The class that reads it: only its errors are told, and only what it does not know is unknown."""
    kind = part.get("type") if isinstance(part, dict) else None
    return "TextPart" if kind == "text" else "RefusalPart" if kind == "refusal" else None


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[RefusalPart, Tag("RefusalPart")],
    Discriminator(_kind, UNKNOWN_PART, "Only parts of the types text and refusal are supported here."),
]
Content = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[Part], Field(fail_fast=True), Tag("list")],
    Discriminator(lambda content: "list" if isinstance(content, list) else "str"),
]


class Message(Body):
    """One turn. `developer` is what newer clients call the system role."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None

    @property
    def text(self) -> str | None:
        if not isinstance(self.content, list):
            return self.content if self.content is not None or self.role != "assistant" else self.refusal or ""
        return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in self.content)

    def for_template(self, index: int) -> dict[str, Any]:
        if self.text is None:
            path = f"messages[{index}].content"
            raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        optional = {"name": self.name, "reasoning_content": self.reasoning_content}
        return message | {name: value for name, value in optional.items() if value is not None}
