"""The fields of a body about its KV, kept on the HTTP request until its prompts go to the scheduler.

sglang hands every handler's HTTP request on to its tokenizer manager, whatever it makes of the body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_importance.placement.hints.hints import Hints, Retain
from sglang_importance.http.requests.cache_control import Breakpoint
from sglang_importance.http.requests.kv_fields import NAMESPACE_FIELDS, KvFields
from sglang_importance.http.requests.prompt_messages import PromptMessages

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.io_struct import EmbeddingReqInput

_ATTRIBUTE = "kv_importance"


@dataclass
class CarriedFields:
    """Of one HTTP request.

    Attributes:
        fields: what its body says.
        messages: that hints may name.
        choices: answers to each prompt.
        breakpoint: up to which the prompt is to be retained; None where nobody asks for that, or a hint says
            more.
        rounds: reports by index of their output, of each time that the request has asked the scheduler: tools
            may make it ask again.
    """

    fields: KvFields
    messages: PromptMessages
    choices: int = 1
    breakpoint: Breakpoint | None = None
    rounds: list[dict[int, dict[str, Any]]] = field(default_factory=list)

    def attach(self, request: Request) -> None:
        setattr(request.state, _ATTRIBUTE, self)

    def put_namespace(self, obj: GenerateReqInput | EmbeddingReqInput) -> None:
        """Gives the namespace, and the session, to a request that its handler has made without one.

        Raises:
            ValueError: the model embeds or classifies, and its requests have no namespace.
        """
        if not isinstance(obj, GenerateReqInput):
            if not self.fields.given():
                return
            names = " and ".join(self.fields.given())
            raise ValueError(f"{names}: a model that does not generate cannot keep it: leave it out")
        for name in NAMESPACE_FIELDS:
            value = getattr(self.fields, name)
            if value is not None and not getattr(obj, name):  # sglang takes "" for none
                setattr(obj, name, value)
        if self.fields.session_id is not None and obj.session_params is None:
            obj.session_id = self.fields.session_id

    @property
    def says_something(self) -> bool:
        """Whether there are hints for its prompts."""
        return self.fields.hints is not None or self.breakpoint is not None

    def hints_for(self, prompt: list[int]) -> Hints:
        """The hints of the request, in tokens of its prompt.

        Raises:
            BadHint: a message is named that the request does not have.
        """
        hints = self.messages.located(self.fields.hints or Hints(), prompt)
        if self.breakpoint is None:
            return hints
        tokens = self.messages.end_of(self.breakpoint.messages, prompt)
        retain = Retain(ttl_seconds=self.breakpoint.ttl_seconds, tokens=tokens) if tokens else None
        return hints.model_copy(update={"retain": retain})

    def reports(self) -> Any:
        """The report, or one for each prompt, or each round; None where there is none."""
        # As sglang counts cached tokens: once per prompt, at its first choice.
        told = [
            report
            for reports in self.rounds
            for index, report in sorted(reports.items())
            if index % self.choices == 0
        ]
        return told[0] if len(told) == 1 else told or None


def carried_by(request: Any) -> CarriedFields | None:
    """What the HTTP request of a call to the tokenizer manager carries; None where there is none."""
    carried: CarriedFields | None = getattr(getattr(request, "state", None), _ATTRIBUTE, None)
    return carried
