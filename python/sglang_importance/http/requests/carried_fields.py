"""The fields of a body about its KV, kept on the HTTP request until its prompts go to the scheduler.

sglang hands every handler's HTTP request on to its tokenizer manager, whatever it makes of the body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import GenerateReqInput

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
        rounds: reports by index of their output, of each time that the request has asked the scheduler: tools
            may make it ask again.
    """

    fields: KvFields
    messages: PromptMessages
    choices: int = 1
    rounds: list[dict[int, dict[str, Any]]] = field(default_factory=list)

    def attach(self, request: Request) -> None:
        setattr(request.state, _ATTRIBUTE, self)

    def put_namespace(self, obj: GenerateReqInput | EmbeddingReqInput) -> None:
        """Gives the namespace to a request that its handler has made without one.

        Raises:
            ValueError: the model embeds or classifies, and its requests have no namespace.
        """
        if not isinstance(obj, GenerateReqInput):
            names = " and ".join(self.fields.given())
            raise ValueError(f"{names}: a model that does not generate cannot keep it: leave it out")
        for name in NAMESPACE_FIELDS:
            value = getattr(self.fields, name)
            if value is not None and getattr(obj, name) is None:
                setattr(obj, name, value)

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
