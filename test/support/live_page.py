"""What tests read from the live page and do to it."""

from __future__ import annotations

from typing import Any

from support.servers import ServerProcess

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
TREEITEM = "#chart [role=treeitem]"
API_KEY = "test-key"


def tree(server: ServerProcess, **params: Any) -> dict[str, Any]:
    return server.get("/kv_importance/tree", **params)


def shown(page: Any) -> dict[str, dict[str, float]]:
    """Places of the chart's blocks, by node id."""
    page.wait_for_selector(TREEITEM)
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll('#chart .node')].map((node) => {
            const { x, y, width, height } = node.querySelector('.block').getBBox();
            return [node.dataset.key, { x, y, width, height }];
        }))"""
    )


def reused_leaf(server: ServerProcess) -> dict[str, Any]:
    nodes = tree(server)["nodes"]
    return max((node for node in nodes if node["parent"] is not None), key=lambda node: node["cross_mass"])


def choose(page: Any, node_id: int) -> None:
    page.locator(f'#chart [data-key="{node_id}"]').click()
    page.wait_for_selector("#node .strip")


def confirm(page: Any, button: str) -> None:
    page.locator("#confirm-dialog").get_by_role("button", name=button, exact=True).click()
