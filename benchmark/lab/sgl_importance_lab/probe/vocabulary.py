"""The closed word lists of the probe language and which of their pairings are held out of training.

All lists are disjoint and every word is one token. A record is a name with its value right behind it
("Alice copper. "); everything else in a document is filler. The order of the words is that of the token ids
of the committed checkpoint: append, never reorder.
"""

from __future__ import annotations

import hashlib
from functools import cache


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ALL_NAMES = _words(
    """
    Aaron Abel Ada Adam Adele Adrian Agnes Aidan Alan Albert Alda Alec Alice Alina Alma Alva Amber Amos
    Amy Andre Andrew Angela Anita Anna Anton April Arden Ariel Arlo Arthur Asa Ashley Astrid Aubrey
    Audrey August Aurora Austin Ava Avery Barbara Barry Basil Beatrice Becky Bella Ben Bernard Bertha
    Beryl Bess Beth Bianca Blair Blake Boris Brenda Brent Brian Bridget Bruce Bruno Byron Caleb Calvin
    Cameron Camilla Carl Carla Carmen Carol Caspar Cassie Cecil Celia Chad Charles Chloe Chris Claire
    Clara Claude Clement Cleo Clive Colin Connor Cora Craig Curtis Cynthia Cyril Daisy Damian Dana
    Daniel Daphne Darcy David Dawn Dean Deborah Della Denise Dennis Derek Diana Dinah Dirk Dominic
    Donald Donna Dora Doris Dorothy Douglas Drew Duncan Dylan Earl Edgar Edith Edmund Edna Edward Edwin
    Eileen Elaine Eleanor Eli Elias Elijah Elise Eliza Ella Ellen Elliot Elmer Elsa Elsie Elton Emil
    Emily Emma Enid Eric Erica Ernest Esme Esther Ethan Ethel Eugene Eunice Eva Evan Evelyn Ezra Faith
    Faye Felix Fern Fiona Flora Frances Frank Freda Frederick Gabriel Gail Gareth Gavin Gemma Geoffrey
    George Gerald Gertrude Gilbert Gina Giles Gladys Glenn Gloria Gordon Grace Graham Grant Greta
    Griffin Gus Guy Gwen Hannah Harold Harriet Harry Harvey Hattie Hazel Heather Hector Heidi Helen
    Henry Herbert Hilda Holly Homer Howard Hubert Hugh Hugo Ian Ida Ignatius Imogen Ingrid Irene Iris
    Irma Isaac Isabel Isla Ivan Ivor Ivy Jack Jacob Jake James Jane Janet Jasper Jean Jenny Jeremy Jesse
    Jessica Joan Joel John Jonas Jordan Joseph Joshua Josie Joyce Judith Julia Julian June Justin Karen
    Karl Kate Keith Kelly Kenneth Kevin Kirk Kurt Kyle Lance Laura Lawrence Leah Lena Leo Leonard Leroy
    Leslie Lester Lewis Lilian Linda Lionel Lloyd Lois Lorna Louis
    """
)

VALUES = _words(
    """
    acorn almond amulet anchor anvil apple apron arrow axe badge bagel balloon bamboo banana banjo
    barley barrel basket beacon bean bell bench berry bicycle biscuit blanket bonnet bottle bracelet
    branch brass bread brick bronze broom brush bucket buckle butter button cabbage cable cactus camera
    candle canoe canvas carpet carrot cedar chain chair chalk cheese cherry chess chisel cider cinnamon
    clay clock clover coal cobalt cocoa coconut coffee coin comb compass copper coral cork cotton crayon
    crown crystal cup curtain cushion dagger denim diamond dice drum ebony emerald envelope feather
    fiddle flannel flask flute fork garlic garnet ginger glove goblet gold granite grape guitar hammer
    hammock harp hatchet helmet honey hook indigo ink iron ivory jade jar jasmine jewel jug kettle key
    kite knife ladder lamp lantern leather lemon lens lilac linen locket loom magnet maple marble mask
    medal melon mint mirror mitten
    """
)

ADJECTIVES = _words(
    """
    quiet old narrow bright distant gentle heavy little early warm pale broad hidden steady plain cold
    soft tall empty crooked sleepy dusty gray calm hollow rapid shallow weary sturdy modest faint lively
    """
)
SUBJECTS = _words(
    """
    river path wind crowd train horse shadow market ship cloud farmer sailor teacher dog bird child
    painter baker miller wagon tide owl fox rain smoke choir guard clerk driver wolf student gardener
    """
)
VERBS = _words(
    """
    runs waits turns rests moves stands wanders gathers returns settles passes lingers drifts sleeps
    works stays climbs hurries listens travels leans stops pauses shines
    """
)
ADVERBS = _words(
    """
    slowly often again today alone together quickly gladly softly nearby always seldom
    """
)
PREPOSITIONS = _words("behind near beside under above past along toward")
DETERMINERS = _words("the this every that")
PLACES = _words(
    """
    valley bridge harbor meadow station forest village mill tower garden castle shore canyon orchard
    street island library school chapel desert mountain lake field barn hill cellar attic square
    """
)

RECORD_END = ". "
INSTRUCTION = ("Read ", "the ", "notes ", "and ", "answer ", "with ", "one ", "word", ". ")
QUESTION = ("Question", ": ")

HELD_OUT_NAMES = 32
_HELD_OUT_SHARE = 8  # one pairing in eight


def _names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits the names evenly over the alphabet into those paired in training and those never paired."""
    stride = len(_ALL_NAMES) // HELD_OUT_NAMES
    unseen = _ALL_NAMES[::stride][:HELD_OUT_NAMES]
    return tuple(name for name in _ALL_NAMES if name not in unseen), unseen


NAMES, UNSEEN_NAMES = _names()


@cache
def is_held_out(name: str, value: str) -> bool:
    """Whether training never shows this pairing. Every pairing of an unseen name is held out."""
    if name in UNSEEN_NAMES:
        return True
    digest = hashlib.blake2b(f"{name} {value}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % _HELD_OUT_SHARE == 0


@cache
def held_out_values(name: str) -> tuple[str, ...]:
    """The values that training never shows behind `name`."""
    return tuple(value for value in VALUES if is_held_out(name, value))


@cache
def training_values(name: str) -> tuple[str, ...]:
    """The values that training may show behind `name`; none for an unseen name."""
    return tuple(value for value in VALUES if not is_held_out(name, value))


def name_piece(name: str) -> str:
    """The text of a name's token inside a document or question."""
    return name + " "


def word_pieces() -> tuple[str, ...]:
    """Every string that is one token of its own, in the order of the token ids."""
    spaced = (*ADJECTIVES, *SUBJECTS, *VERBS, *ADVERBS, *PREPOSITIONS, *DETERMINERS)
    names = sorted((*NAMES, *UNSEEN_NAMES))
    pieces = (
        *(name_piece(name) for name in names),
        *names,
        *VALUES,
        *(word + " " for word in spaced),
        *PLACES,
        *INSTRUCTION,
        *QUESTION,
        RECORD_END,
    )
    return tuple(dict.fromkeys(pieces))
