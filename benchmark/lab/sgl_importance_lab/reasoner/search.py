"""Depth-first search with an explicit stack: a dead end goes back to the node that it was entered from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from sgl_importance_lab.reasoner.thought import BadPrompt, Solution, Thought, after
from sgl_importance_lab.reasoner.vocabulary import NO_NODE, NODES, head

_MOST_NEIGHBOURS = 4
_TOKENS_PER_NODE = (8, 13)
"""Of a thought, for each node of the graph: so much of a graph is searched when its goal is found."""
_SHORTEST_SHARE = 0.85
_STATE_GAP = range(31, 37)
"""Lengths that no thought about a state has: where one of them is asked for, it has the 30 tokens below."""
_NODES_BY_HEAD = {head(node): node for node in NODES}
FEWEST_TOKENS = 32
MOST_TOKENS = _TOKENS_PER_NODE[1] * len(NODES) * 3 // 4


@dataclass(frozen=True)
class Search:
    """From `start` to `goal`; asks for the path, or, with `asked`, for the node that one was entered from."""

    neighbours: Mapping[str, Sequence[str]]
    start: str
    goal: str
    asked: str | None = None

    @property
    def words(self) -> list[str]:
        """The prompt, word by word."""
        words = ["Graph", ":"]
        for node, neighbours in self.neighbours.items():
            words += [head(node), *neighbours, "."]
        words += ["Question", ":", self.start, "to", self.goal]
        return [*words, *(("path",) if self.asked is None else ("before", self.asked)), "?"]

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Search:
        """Reads what `words` writes; BadPrompt for anything else."""
        body = after(words, "Graph")
        question = after(body, "Question")
        neighbours: dict[str, list[str]] = {}
        record: list[str] = []
        for word in body[: len(body) - len(question) - 2]:
            if word != ".":
                record.append(word)
                continue
            node = _NODES_BY_HEAD.get(record[0]) if record else None
            if node is None or node in neighbours:
                raise BadPrompt(f"'{' '.join(record)} .' is no record of a graph")
            neighbours[node], record = record[1:], []
        if record:
            raise BadPrompt(f"'{' '.join(record)}' is cut off")
        match list(question):
            case [start, "to", goal, "path", "?"]:
                asked = None
            case [start, "to", goal, "before", asked, "?"]:
                pass
            case _:
                raise BadPrompt(f"'{' '.join(question)}' is no question about a graph")
        unknown = {start, goal, *((asked,) if asked else ())}.union(*neighbours.values()) - neighbours.keys()
        if unknown:
            raise BadPrompt(f"the graph has no record of {', '.join(sorted(unknown))}")
        return cls(neighbours, start, goal, asked)

    def solve(self) -> Solution:
        """Enters and leaves nodes until the goal is entered, then reads the answer off the thought.

        `visit Bea from Ada BEA Ada seen Carl new` lists the neighbours of Bea up to the first that was not
        entered yet, which the next step enters. Where all are seen, `back Ada from none ADA ...` leaves Bea
        for the node it was entered from, and says where that one had been entered from.

        Raises BadPrompt where the goal cannot be reached, or the node asked for is not entered before it.
        """
        thought = Thought()
        parents: dict[str, str] = {}
        mentions: dict[str, int] = {}
        """Index of the last token that names each node in the thought."""
        entered: dict[str, int] = {}
        """Index of the last token that says where each node was entered from."""

        def name(node: str) -> None:
            mentions[node] = thought.write(node)

        def header(kind: str, node: str) -> None:
            thought.begin(kind)
            thought.write(kind)
            name(node)
            thought.write("from")
            source = entered.get(node)
            entered[node] = thought.read(parents[node], source, "return")
            mentions[parents[node]] = entered[node]

        node, parents[self.start] = self.start, NO_NODE
        header("visit", node)
        while node != self.goal:
            thought.write(head(node))
            for neighbour in self.neighbours[node]:
                last = mentions.get(neighbour)
                name(neighbour)
                if neighbour not in parents:
                    thought.write("new")
                    parents[neighbour], node = node, neighbour
                    header("visit", node)
                    break
                thought.read("seen", last, "seen")
            else:
                node = parents[node]
                if node == NO_NODE:
                    raise BadPrompt(f"{self.goal} cannot be reached from {self.start}")
                header("back", node)
        thought.begin("goal")
        thought.write("goal")
        if self.asked is not None:
            if self.asked not in parents:
                raise BadPrompt(f"{self.asked} is not entered before {self.goal}")
            thought.begin("state")
            thought.write("before", self.asked, "from")
            thought.read(parents[self.asked], entered[self.asked], "asked")
            return Solution(thought, parents[self.asked])
        thought.begin("path")
        thought.write("path", node)
        path = [node]
        while node != NO_NODE:
            thought.write("from")
            thought.read(parents[node], entered[node], "path")
            node = parents[node]
            path.append(node)
        return Solution(thought, " ".join(path[:-1]))


def _draw_tree(num_nodes: int, rng: Random) -> tuple[dict[str, list[str]], str]:
    """A random tree with at most four branches at a node, as neighbours of each node, and its root.

    No more edges: every node stands in one record as a neighbour, so what follows it there is found by its
    name alone. With 30 % more the model had not learnt to find it by record and name in 40 minutes.
    """
    nodes = rng.sample(NODES, num_nodes)
    edges: dict[str, list[str]] = {nodes[0]: []}
    for node in nodes[1:]:
        edges[rng.choice([each for each in edges if len(edges[each]) < _MOST_NEIGHBOURS])].append(node)
        edges[node] = []
    for neighbours in edges.values():
        rng.shuffle(neighbours)
    return {node: edges[node] for node in rng.sample(nodes, num_nodes)}, nodes[0]


def _order(neighbours: Mapping[str, Sequence[str]], start: str) -> list[str]:
    """Nodes in the order in which a depth-first search enters them."""
    order, entered, stack = [], set(), [start]
    while stack:
        node = stack.pop()
        if node in entered:
            continue
        entered.add(node)
        order.append(node)
        stack += reversed(neighbours[node])
    return order


def _num_nodes(tokens: int, rng: Random) -> int:
    return max(4, min(len(NODES), round(tokens / rng.uniform(*_TOKENS_PER_NODE))))


def draw_search(tokens: int, rng: Random, asks_state: bool) -> Search:
    """A search whose thought has at most `tokens` tokens and at least 85 % of them; a state has 30 of 36.

    The node asked for, with `asks_state`, is any that was entered behind the start. Raises ValueError for a
    number of tokens under `FEWEST_TOKENS` or over `MOST_TOKENS`.
    """
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        raise ValueError(f"a search's thought has {FEWEST_TOKENS} to {MOST_TOKENS} tokens, not {tokens}")
    shortest = _STATE_GAP.start - 1 if asks_state and tokens in _STATE_GAP else _SHORTEST_SHARE * tokens
    while True:
        neighbours, start = _draw_tree(_num_nodes(tokens, rng), rng)
        order = _order(neighbours, start)
        asked_number = rng.random()
        low, high = 1, len(order) - 1
        # The thought grows with the number of the goal in the order of entering, but for its path read back.
        while low <= high:
            middle = (low + high) // 2
            asked = order[1 + int(asked_number * middle)] if asks_state else None
            search = Search(neighbours, start, order[middle], asked)
            length = len(search.solve().thought.pieces)
            if shortest <= length <= tokens:
                return search
            if length > tokens:
                high = middle - 1
            else:
                low = middle + 1
