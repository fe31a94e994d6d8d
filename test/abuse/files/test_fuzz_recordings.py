"""Spoiled recordings are read up to the damage."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import msgspec

from sgl_importance.observe.trace import TraceError as RecordingError
from sgl_importance.observe.trace import open_trace
from sgl_importance.observe.trace.framing import MAGIC, FrameReader, frame

from support.fuzz import check_message, check_one_line, damage, examples, spoil


def check_recording(folder: Path, *, commands: bool) -> None:
    try:
        records = list(open_trace(folder))
    except RecordingError as error:
        check_message(error)
    else:
        assert len(records) <= 2 + 3 * 12
    if commands:
        check_one_line(["trace", "info", str(folder)])
        check_one_line(["trace", "convert", str(folder), str(folder.with_name("out.jsonl"))])
        check_one_line(["replay", str(folder), "--capacity-blocks", "3", "--policies", "lru", "--jobs", "1"])
        check_one_line(["study", "h2", str(folder), "--no-figure", "--out", str(folder.parent)])


@examples(60, 4000)
def test_a_spoiled_recording_is_read_up_to_the_damage(segment: Path, tmp_path: Path, count: int) -> None:
    rng = random.Random(6)
    folder = tmp_path / "spoiled"
    folder.mkdir()
    for example in range(count):
        (folder / segment.name).write_bytes(damage(rng, segment.read_bytes()))
        check_recording(folder, commands=example % 15 == 0)


@examples(100, 10_000)
def test_nonsense_in_whole_frames_is_refused(segment: Path, tmp_path: Path, count: int) -> None:
    """Frames whose checksum is right and whose content no writer of ours has written."""
    rng = random.Random(7)
    with segment.open("rb") as file:
        frames = list(FrameReader(file))
    folder = tmp_path / "nonsense"
    folder.mkdir()
    for example in range(count):
        spoiled = list(frames)
        place = rng.randrange(len(spoiled))
        match rng.randrange(4):
            case 0:
                spoiled[place] = damage(rng, spoiled[place])
            case 1:
                with suppress(OverflowError):  # MessagePack has no such number
                    spoiled[place] = msgspec.msgpack.encode(
                        spoil(rng, msgspec.msgpack.decode(spoiled[place]))
                    )
            case 2:
                del spoiled[place]
            case 3:
                spoiled.insert(place, rng.choice(frames))
        (folder / segment.name).write_bytes(MAGIC + b"".join(map(frame, spoiled)))
        check_recording(folder, commands=example % 30 == 0)
