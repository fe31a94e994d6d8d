#!/usr/bin/env python3
"""Makes the picture of the page of all servers in docs/img: the embedded model, traffic, and Chromium.

    .venv/bin/python scripts/screenshots.py [--out FOLDER]

Those of the live page are made by `bash scripts/demo.sh --pictures docs/img`, which calls ``take``.

Needs `bash scripts/setup.sh --with-browser`.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "test"))

from sgl_importance.cli.fleet_page import FleetPage  # noqa: E402
from sgl_importance.cli.fleet_view import FleetView  # noqa: E402
from sgl_importance.embedded_model import checkpoint_path  # noqa: E402
from sgl_importance_lab.probe.tasks import make_document  # noqa: E402

from support.browser import open_browser  # noqa: E402
from support.config_file import config_flags  # noqa: E402
from support.servers import ServerProcess  # noqa: E402

PAGE_SIZE = 16
FLAGS = (
    *("--kv-policy", "importance", "--page-size", str(PAGE_SIZE), "--max-total-tokens", "2048"),
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-write-policy", "write_through"),
    *("--hicache-storage-backend", "file", *config_flags(signal={"window": 2})),
)
SECONDS_BETWEEN = 0.7
SYSTEMS = (
    "You are asked for records. Answer with the value that stands behind the name. ",
    "You keep the list of the lost and found office. Say in one word what belongs to whom, and be polite. ",
)
VIEWS = {
    "ui": {"width": 1280, "height": 1050, "color_scheme": "light"},
    "ui-dark": {"width": 1280, "height": 1050, "color_scheme": "dark"},
}


def fill(server: ServerProcess, turns: int = 60) -> None:
    """Two assistants that answer questions about documents, some often: more than the device holds."""
    rng = Random(7)
    documents = [make_document(rng.randint(120, 420), seed) for seed in range(8)]
    for turn in range(turns):
        time.sleep(SECONDS_BETWEEN)
        document = documents[min(rng.randrange(len(documents)), rng.randrange(len(documents)))]
        names = list(document.records)
        question = document.messages(rng.choice(names[:3]))[-1]
        opening = {"role": "system", "content": SYSTEMS[rng.random() < 0.3]}
        messages = [opening, question]
        answer = server.chat(messages, max_tokens=4)["choices"][0]["message"]["content"]
        if turn % 4 == 0:
            again = {"role": "user", "content": f"Question: {rng.choice(names)}"}
            server.chat([*messages, {"role": "assistant", "content": answer}, again], max_tokens=4)
    tree = server.get("/kv_importance/tree")["nodes"]
    asked = max((node for node in tree if node["parent"] is not None), key=lambda node: node["queries"])
    server.post("/kv_importance/pin", server.get(f"/kv_importance/node/{asked['id']}/prompt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="folder of the pictures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ServerProcess(*FLAGS, model=checkpoint_path()) as server:
        fill(server)
        with ServerProcess(*FLAGS, model=checkpoint_path()) as other:
            fill(other, turns=30)
            take_fleet([server.base_url, other.base_url], arguments.out)


def take(url: str, out: Path) -> None:
    """A picture of every view, with the hottest node of the tree chosen."""
    with open_browser() as browser:
        for name, view in VIEWS.items():
            size = {"width": view["width"], "height": view["height"]}
            page = browser.new_page(viewport=size, color_scheme=view["color_scheme"], device_scale_factor=1)
            page.goto(f"{url}/kv_importance/ui")
            page.wait_for_selector("#chart [role=treeitem]")
            nodes = page.evaluate("async () => (await (await fetch('tree')).json()).nodes")
            branches = [node for node in nodes if node["parent"] is not None]
            hottest = max(branches or nodes, key=lambda node: node["cross_mass"])["id"]
            page.locator(f'#chart [data-key="{hottest}"]').first.click()
            page.wait_for_selector("#node .strip")
            file = out / f"{name}.png"
            page.screenshot(path=file, full_page=True)
            print(file)
            page.close()


def take_fleet(urls: Sequence[str], out: Path) -> None:
    """A picture of the page of all servers."""
    with FleetPage(FleetView(urls), 0) as fleet, open_browser() as browser:
        thread = threading.Thread(target=fleet.serve_forever)
        thread.start()
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(fleet.url)
        page.wait_for_selector("[data-prefix]")
        page.screenshot(path=out / "fleet.png", full_page=True)
        print(out / "fleet.png")
        fleet.shutdown()
        thread.join()


if __name__ == "__main__":
    main()
