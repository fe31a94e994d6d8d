"""Which tasks of lm-evaluation-harness are asked, and where each has its prompts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """A standard benchmark.

    Attributes:
        folder: of the harness's tasks, that has a file of each.
        tasks: names in lm-evaluation-harness that are asked by default.
        others: further names.
        makes_prompts: with a tokenizer, of any length; else they are a data set of the hub or in a file.
        metric: of a sample's row that says how right it was, 0 to 1; None where it is named by the length.
        filter: of the harness's filters of answers, the one that counts.
    """

    folder: str
    tasks: tuple[str, ...]
    others: tuple[str, ...] = ()
    makes_prompts: bool = False
    metric: str | None = "exact_match"
    filter: str = "none"

    @property
    def known(self) -> tuple[str, ...]:
        return (*self.tasks, *self.others)


SUITES = {
    # Hsieh et al. 2024. The tasks left out read essays or questions that the harness fetches from the hub.
    "ruler": Suite(
        "ruler",
        ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"),
        makes_prompts=True,
        metric=None,
    ),
    "aime": Suite("aime", ("aime24",), ("aime25",)),
    "gpqa": Suite(
        "gpqa/cot_zeroshot",
        ("gpqa_diamond_cot_zeroshot",),
        ("gpqa_main_cot_zeroshot",),
        filter="flexible-extract",
    ),
}
