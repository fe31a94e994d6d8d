"""Programs of dependent variables: the thought states every value, and later lines need far ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from sgl_importance.reasoner.thought import BadPrompt, Solution, Thought, after
from sgl_importance.reasoner.vocabulary import MODULUS, NODES, OPERATORS

LINE_TOKENS = 11
_ANSWER_TOKENS = 3
_MOST_INPUTS = 6
_LINE_WORDS = 6
MOST_TOKENS = LINE_TOKENS * (len(NODES) - _MOST_INPUTS) + _ANSWER_TOKENS
FEWEST_TOKENS = 2 * LINE_TOKENS + _ANSWER_TOKENS


@dataclass(frozen=True)
class Line:
    """target = left operator right, modulo 10."""

    target: str
    left: str
    operator: str
    right: str

    def value(self, values: Mapping[str, int]) -> int:
        sign = 1 if self.operator == "+" else -1
        return (values[self.left] + sign * values[self.right]) % MODULUS


@dataclass(frozen=True)
class Program:
    inputs: Mapping[str, int]
    lines: Sequence[Line]
    asked: str

    @property
    def words(self) -> list[str]:
        """The prompt, word by word."""
        words = ["Program", ":"]
        for name, value in self.inputs.items():
            words += [name, str(value), "."]
        words += ["Compute", ":"]
        for line in self.lines:
            words += [line.target, "=", line.left, line.operator, line.right, "."]
        return [*words, "Question", ":", self.asked, "?"]

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Program:
        """Reads what `words` writes; BadPrompt for anything else."""
        body = after(words, "Program")
        split = len(body) - len(after(body, "Compute"))
        rest = body[split:]
        question = after(rest, "Question")
        inputs: dict[str, int] = {}
        for name, value, end in _groups(body[: split - 2], 3):
            if not value.isdecimal() or int(value) >= MODULUS or end != "." or name in inputs:
                raise BadPrompt(f"'{name} {value} {end}' is no input of a program")
            inputs[name] = int(value)
        known = set(inputs)
        lines = []
        for target, equals, left, operator, right, end in _groups(
            rest[: len(rest) - len(question) - 2], _LINE_WORDS
        ):
            if equals != "=" or end != "." or operator not in OPERATORS or target in known:
                words = (target, equals, left, operator, right, end)
                raise BadPrompt(f"'{' '.join(words)}' is no line of a program")
            for operand in (left, right):
                if operand not in known:
                    raise BadPrompt(f"the line of {target} needs {operand}, which has no value by then")
            known.add(target)
            lines.append(Line(target, left, operator, right))
        if len(question) != 2 or question[1] != "?" or question[0] not in known:
            raise BadPrompt(f"'{' '.join(question)}' does not ask for a variable of the program")
        return cls(inputs, lines, question[0])

    def solve(self) -> Solution:
        """`Ada = Bea 3 + Carl 5 : Ada 8 .` for each line, then `answer` and the variable asked for."""
        values = dict(self.inputs)
        mentions: dict[str, int] = {}
        """Index of the last token that states each variable's value in the thought."""
        thought = Thought()

        def state(name: str, kind: str) -> None:
            thought.write(name)
            mentions[name] = thought.read(str(values[name]), mentions.get(name), kind)

        for line in self.lines:
            thought.begin("line")
            thought.write(line.target, "=")
            state(line.left, "operand")
            thought.write(line.operator)
            state(line.right, "operand")
            thought.write(":", line.target)
            values[line.target] = line.value(values)
            mentions[line.target] = thought.write(str(values[line.target]))
            thought.write(".")
        thought.begin("answer")
        thought.write("answer")
        state(self.asked, "asked")
        return Solution(thought, str(values[self.asked]))


def _groups(words: Sequence[str], size: int) -> list[Sequence[str]]:
    if len(words) % size:
        raise BadPrompt(f"'{' '.join(words[-size:])}' is cut off")
    return [words[start : start + size] for start in range(0, len(words), size)]


def draw_program(tokens: int, rng: Random) -> Program:
    """A program whose thought has at most `tokens` tokens and at most 10 fewer.

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
    # Ascending by the line that mentioned a variable last.
    by_mention = list(inputs)
    last_mention = dict.fromkeys(inputs, -1)
    lines = []
    for number, target in enumerate(names[num_inputs:]):
        operands: list[str] = []
        while len(operands) < 2:
            lines_ago = round((number + 1) ** rng.random())
            near = min(
                (name for name in by_mention if name not in operands),
                key=lambda name: (abs(number - last_mention[name] - lines_ago), rng.random()),
            )
            operands.append(near)
        lines.append(Line(target, operands[0], rng.choice(OPERATORS), operands[1]))
        for name in (*operands, target):
            last_mention[name] = number
        by_mention.append(target)
    asked = rng.choice(lines[-max(1, count // 4) :]).target
    return Program(inputs, lines, asked)
