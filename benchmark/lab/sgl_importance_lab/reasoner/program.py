"""Programs of dependent variables: the thought states every value, and later lines need far ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from sgl_importance_lab.reasoner.thought import BadPrompt, Solution, Thought, after
from sgl_importance_lab.reasoner.vocabulary import MODULUS, NODES, head

LINE_TOKENS = 8
_ANSWER_TOKENS = 3
_MOST_INPUTS = 6
_INPUT_WORDS = 3
_LINE_WORDS = 4
MOST_TOKENS = LINE_TOKENS * (len(NODES) - _MOST_INPUTS) + _ANSWER_TOKENS
FEWEST_TOKENS = 2 * LINE_TOKENS + _ANSWER_TOKENS


@dataclass(frozen=True)
class Line:
    """target = left + right, modulo 10."""

    target: str
    left: str
    right: str


@dataclass(frozen=True)
class Program:
    inputs: Mapping[str, int]
    lines: Sequence[Line]
    asked: str

    @property
    def words(self) -> list[str]:
        """The prompt, word by word: inputs, the line of each target, their order, the question."""
        words = ["Program", ":"]
        for name, value in self.inputs.items():
            words += [name, str(value), "."]
        words += ["Sums", ":"]
        for line in self.lines:
            words += [head(line.target), line.left, line.right, "."]
        words += ["Order", ":", *(head(line.target) for line in self.lines), "."]
        return [*words, "Question", ":", self.asked, "?"]

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Program:
        """Reads what `words` writes; BadPrompt for anything else."""
        body = after(words, "Program")
        sums = after(body, "Sums")
        order = after(sums, "Order")
        question = after(order, "Question")
        inputs: dict[str, int] = {}
        for name, value, end in _groups(body[: len(body) - len(sums) - 2], _INPUT_WORDS):
            if not value.isdecimal() or int(value) >= MODULUS or end != "." or name in inputs:
                raise BadPrompt(f"'{name} {value} {end}' is no input of a program")
            inputs[name] = int(value)
        nodes = {head(node): node for node in NODES}
        known = set(inputs)
        lines = []
        for target, left, right, end in _groups(sums[: len(sums) - len(order) - 2], _LINE_WORDS):
            if end != "." or nodes.get(target, target) in {target, *known}:
                raise BadPrompt(f"'{target} {left} {right} {end}' is no line of a program")
            for operand in (left, right):
                if operand not in known:
                    raise BadPrompt(f"the line {target} needs {operand}, which has no value by then")
            known.add(nodes[target])
            lines.append(Line(nodes[target], left, right))
        if list(order[: len(order) - len(question) - 2]) != [*(head(line.target) for line in lines), "."]:
            raise BadPrompt("the order of a program is not that of its lines")
        if len(question) != 2 or question[1] != "?" or question[0] not in known:
            raise BadPrompt(f"'{' '.join(question)}' does not ask for a variable of the program")
        return cls(inputs, lines, question[0])

    def solve(self) -> Solution:
        """`ADA Bea 3 Carl 5 Ada 8 ADA` for each line, then `. answer` and the variable asked for."""
        values = dict(self.inputs)
        mentions: dict[str, int] = {}
        """Index of the last token that states each variable's value in the thought."""
        thought = Thought()

        def state(name: str, kind: str) -> None:
            thought.write(name)
            mentions[name] = thought.read(str(values[name]), mentions.get(name), kind)

        for line in self.lines:
            thought.begin("line")
            thought.write(head(line.target))
            state(line.left, "operand")
            state(line.right, "operand")
            values[line.target] = (values[line.left] + values[line.right]) % MODULUS
            state(line.target, "target")
            thought.write(head(line.target))
        thought.begin("answer")
        thought.write("answer")
        state(self.asked, "asked")
        return Solution(thought, str(values[self.asked]))


def _groups(words: Sequence[str], size: int) -> list[Sequence[str]]:
    if len(words) % size:
        raise BadPrompt(f"'{' '.join(words[-size:])}' is cut off")
    return [words[start : start + size] for start in range(0, len(words), size)]


def draw_program(tokens: int, rng: Random) -> Program:
    """A program whose thought has at most `tokens` tokens and at most 7 fewer.

    An operand was last mentioned a number of lines ago that is drawn evenly on a logarithmic scale, from one
    line to the whole program: references are near, far and everything between. Raises ValueError for a number
    of tokens under `FEWEST_TOKENS` or over `MOST_TOKENS`.
    """
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        raise ValueError(f"a program's thought has {FEWEST_TOKENS} to {MOST_TOKENS} tokens, not {tokens}")
    count = (tokens - _ANSWER_TOKENS) // LINE_TOKENS
    num_inputs = min(_MOST_INPUTS, count + 1)
    names = rng.sample(NODES, num_inputs + count)
    inputs = {name: rng.randrange(MODULUS) for name in names[:num_inputs]}
    last_mention = dict.fromkeys(inputs, -1)
    lines = []
    for number, target in enumerate(names[num_inputs:]):
        operands: list[str] = []
        while len(operands) < 2:
            lines_ago = round((number + 1) ** rng.random())
            near = min(
                (name for name in last_mention if name not in operands),
                key=lambda name: (abs(number - last_mention[name] - lines_ago), rng.random()),
            )
            operands.append(near)
        lines.append(Line(target, *operands))
        last_mention |= dict.fromkeys((*operands, target), number)
    asked = rng.choice(lines[-max(1, count // 4) :]).target
    return Program(inputs, lines, asked)
