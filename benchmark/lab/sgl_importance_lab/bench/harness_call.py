"""Run by the harness's own interpreter: asks one server a suite, writes the samples.

It knows the harness and nothing of ours. What to ask comes in a JSON file; samples go to a second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager


def main(asked_file: str, samples_file: str) -> None:
    asked = json.loads(Path(asked_file).read_text(encoding="utf-8"))
    manager = TaskManager(
        include_path=asked["folders"],
        include_defaults=False,  # reading all of the harness's thousands of tasks takes longer than asking
        metadata=asked["metadata"],
    )
    found = simple_evaluate(
        model=asked["model"],
        model_args=asked["model_args"],
        tasks=asked["tasks"],
        limit=asked["limit"],
        gen_kwargs=asked["gen_kwargs"],
        apply_chat_template=asked["chat"],
        metadata=asked["metadata"],
        task_manager=manager,
        bootstrap_iters=0,  # intervals are ours, over pairs
    )
    Path(samples_file).write_text(json.dumps(found["samples"], default=str), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
