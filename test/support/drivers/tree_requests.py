"""Whole requests on a driven tree, and the nodes that they leave."""

from __future__ import annotations

import numpy as np

from support.drivers.tree_driver import PAGE, Request, TreeDriver


def pages(*masses: float) -> np.ndarray:
    return np.array(masses)


def serve(
    driver: TreeDriver,
    tokens: list[int],
    prefill: np.ndarray | None = None,
    decode: np.ndarray | None = None,
    output: tuple[int, ...] = (7,),
    *,
    salt: str | None = None,
) -> Request:
    request = driver.admit(tokens, salt)
    driver.prefill(request, body=prefill)
    driver.decode(request, list(output), body=decode)
    driver.finish(request)
    return request


def path_of(driver: TreeDriver, tokens: list[int]):
    """Nodes that hold the tokens, found like any request finds them."""
    request = driver.admit([*tokens, -1])
    nodes = driver.component.state.tree.path(driver.core.node_by_id(request.last_node))
    driver.abort(request)
    return [(node, driver.component.state.tree.metadata(node)) for node in nodes]


def prompt(start: int, num_pages: int) -> list[int]:
    return list(range(start, start + num_pages * PAGE))
