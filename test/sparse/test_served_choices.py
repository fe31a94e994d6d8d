"""What a server answers from chosen pages, beside the arithmetic that judges selectors without one."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer

from benchmark.sparse.real.choosing import chosen_answers, exact_answers, of_selector
from benchmark.sparse.real.windows import Task, Window
from benchmark.sparse.real_model import selector_of
from sgl_importance.embedded_model import checkpoint_path
from sgl_importance_lab.probe.tasks import make_document
from sgl_importance_lab.trained_model.decoder import Decoder, Prefill

from support.served import script_server

pytestmark = pytest.mark.server

NAME, PAGE, BUDGET, ANSWER_TOKENS, PROMPT_TOKENS = "bits", 16, 80, 20, 620
REAL_MODEL = Path(__file__).parents[2] / ".cache/models/smollm2"


@pytest.mark.parametrize(
    ("model", "text", "rounding"),
    [
        pytest.param(checkpoint_path(), make_document(600, 0).text, 2e-3, id="embedded"),
        pytest.param(
            REAL_MODEL,
            "\n\n".join(topics[topic] for topic in ("assignment", "class", "function")),
            2e-2,  # of thirty layers, some choose between pages that are as good
            id="smollm2",
            marks=(
                pytest.mark.nightly,
                pytest.mark.skipif(
                    not REAL_MODEL.exists(), reason="scripts/serve.sh --model smollm2 brings it"
                ),
            ),
        ),
    ],
)
def test_a_server_chooses_what_the_evaluation_chooses(model: Path, text: str, rounding: float) -> None:
    """A document of some forty pages, an answer each token of which reads five."""
    flags = (
        *("--kv-policy", "importance", "--kv-residency", "tiered", "--page-size", str(PAGE)),
        *("--max-total-tokens", "4096", "--kv-device-tokens", "1024", "--max-running-requests", "2"),
        *("--kv-sparse-selector", NAME, "--kv-sparse-budget", str(BUDGET), "--kv-sparse-min-context", "64"),
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = tokenizer.encode(text).ids[:PROMPT_TOKENS]
    with script_server(*flags, model=model) as server:
        body = {
            "input_ids": prompt,
            "return_logprob": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        }
        reply = server.post("/generate", body)
    served = [value for value, _, _ in reply["meta_info"]["output_token_logprobs"]]
    answer = tuple(reply["output_ids"])

    with torch.no_grad():
        decoder = Decoder(model)
        size = len(prompt) // PAGE * PAGE
        # The first token of an answer comes from the prompt, exactly; those behind it choose.
        task = Task("plain", (*prompt[size:], answer[0]), answer[1:])
        window = Window("document", 0, torch.tensor(prompt[:size]), (task,))
        prefill = Prefill(decoder, window.tokens)
        exact = exact_answers(decoder, window, prefill)
        (found,), _ = chosen_answers(
            decoder,
            window,
            prefill,
            exact,
            of_selector(selector_of(NAME, decoder)),
            grain="layer",
            share=BUDGET,
            page_size=PAGE,
        )
    scored = torch.tensor(task.scored)[:, None]
    expected = found.gather(1, scored)[:, 0]
    torch.testing.assert_close(torch.tensor(served[1:]), expected, rtol=0, atol=rounding)
    from_everything = exact[0].log_probabilities.gather(1, scored)[:, 0]
    assert float((from_everything - expected).abs().max()) > 10 * rounding, (
        "nothing was left out that mattered"
    )
