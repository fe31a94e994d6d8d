"""Greedy answers of a server with the logprobs of its likeliest tokens: sglang's own route, or OpenAI's."""

from __future__ import annotations

from typing import Any

from sgl_importance_lab.agree.agreement import Step
from sgl_importance_lab.agree.forced_answer import LEAD, processor_text, without_lead
from sgl_importance_lab.probe.chat_client import ChatClient, ServerError

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


class AnswerClient(ChatClient):
    """Asks one server.

    Attributes:
        served_model: name of the model, known from ``look``.
        is_sglang: likewise; such servers are asked for token ids.
        forces: whether it decodes a given answer.
    """

    served_model = ""
    is_sglang = False
    forces = False

    async def look(self) -> None:
        """Finds out what the server is."""
        self.served_model = await self.model()
        try:
            told = await self._request("GET", "/server_info")
        except ServerError:
            return  # only sglang has this route
        self.is_sglang = isinstance(told, dict) and "enable_custom_logit_processor" in told
        # With overlapping schedules a processor sees a request's tokens one step late.
        self.forces = bool(
            self.is_sglang and told["enable_custom_logit_processor"] and told.get("disable_overlap_schedule")
        )

    async def ids(self, body: dict[str, Any]) -> list[int]:
        """The prompt in sglang's token ids, by the server's own chat template and tokenizer."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        route = CHAT if prompt is None else COMPLETIONS
        sent = {
            **body,
            "model": self.served_model,
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
        }
        reply = await self._request("POST", route, sent)
        try:
            return list(reply["choices"][0]["prompt_token_ids"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._not_openai() from error

    async def answer_to_ids(
        self, prompt: list[int], tokens: int, top: int, *, forced: list[int] | None
    ) -> tuple[list[int], list[Step]]:
        """sglang's answer: token ids, and steps named by them.

        Args:
            forced: the answer to decode; None lets the server find its own.
        """
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": len(forced) if forced else tokens}
        body: dict[str, Any] = {"input_ids": prompt, "return_logprob": True, "top_logprobs_num": top}
        if forced:
            sampling |= {"ignore_eos": True, "custom_params": {"forced": forced, "lead": LEAD}}
            body["custom_logit_processor"] = processor_text()
        reply = await self._request("POST", GENERATE, {**body, "sampling_params": sampling})
        try:
            ids = [int(token) for token in reply["output_ids"]]
            chosen = reply["meta_info"]["output_token_logprobs"]
            tops = reply["meta_info"]["output_top_logprobs"]
        except (KeyError, TypeError) as error:
            raise self._not_openai() from error
        if forced and ids != forced:
            raise ServerError(
                f"{self.base_url} does not decode the answer that it is given: start it with "
                "--enable-custom-logit-processor --disable-overlap-schedule"
            )
        steps = []
        for own, likeliest in zip(chosen, tops, strict=True):
            logprobs = {str(token): float(value) for value, token, *_ in (*reversed(likeliest), own)}
            token = str(own[1])
            steps.append(Step(token, without_lead(logprobs, token) if forced else logprobs))
        return ids, steps

    async def answer(self, body: dict[str, Any], tokens: int, top: int) -> list[Step]:
        """The server's own answer by OpenAI's routes; steps are named by the tokens' texts."""
        sent = {**body, "model": self.served_model, "max_tokens": tokens, "temperature": 0}
        is_chat = "messages" in body
        sent |= {"logprobs": True, "top_logprobs": top} if is_chat else {"logprobs": top}
        reply = await self._request("POST", CHAT if is_chat else COMPLETIONS, sent)
        try:
            found = reply["choices"][0]["logprobs"]
            if is_chat:
                return [
                    Step(
                        each["token"],
                        {one["token"]: float(one["logprob"]) for one in (*each["top_logprobs"][::-1], each)},
                    )
                    for each in found["content"]
                ]
            rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
            return [Step(token, {**named, token: float(own)}) for token, own, named in rows]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self.base_url} gives no logprobs: start it so that it does, and allow {top} of them"
            ) from error
