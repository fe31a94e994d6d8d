"""The file of ``--kv-importance-config``, and what it says of one that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_importance.options.importance_options import DEFAULTS, SETTINGS, ImportanceOptions
from sgl_importance.options.options_file import FILE_KEYS, config_values, read_config

from support.config_file import config_flags


def test_a_file_chooses_by_group() -> None:
    _, file = config_flags(signal={"interval": 3, "layers": [2, 0], "half_life_queries": 8})
    options = ImportanceOptions.of(read_config(file))
    assert (options.signal.interval, options.signal.layers) == (3, (0, 2))
    assert type(options.signal.half_life_queries) is float


def test_every_option_has_a_flag_or_a_key_and_no_two_share_one() -> None:
    flags = [setting.flag for setting in SETTINGS.values() if setting.flag]
    assert len(flags) == len(set(flags))
    assert {*FILE_KEYS} == {place for place, setting in SETTINGS.items() if not setting.flag}
    assert all("." in key for key in FILE_KEYS), "a key without a group"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[signal]\nintervall = 3", "there is no signal.intervall: did you mean interval under [signal]?"),
        ("interval = 3", "there is no interval: did you mean interval under [signal]?"),
        ("[sparse]\nbudget = 3", "sparse.budget is given as a flag: --kv-sparse-budget"),
        ("policy = 'observe'", "policy is given as a flag: --kv-policy"),
        ("[xyz]\nqqq = 1", "there is no xyz.qqq: the keys are signal.g, "),
        ("[sparse]\nresident_bias = 1", "there is no sparse.resident_bias: the keys are signal.g, "),
        (
            "[signal]\nhalf_life = 1",
            "there is no signal.half_life: did you mean half_life_queries under [signal]?",
        ),
        ("[signal]\ninterval = 0", "signal.interval of --kv-importance-config must be a whole"),
        ("[signal]\nlayers = ['a']", "signal.layers of --kv-importance-config must be a whole"),
        ("[signal", "is no TOML file: "),
    ],
)
def test_what_cannot_be_used_is_one_line_with_the_cure(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "options.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(problem)) as error:
        ImportanceOptions.of(read_config(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "problem"), [("absent.toml", "no such file or directory"), (".", "is a directory")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--kv-importance-config {tmp_path / name}: {problem}")):
        read_config(tmp_path / name)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML file"):
        read_config(file)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(place=st.sampled_from(FILE_KEYS), value=_VALUES)
def test_any_value_is_taken_or_refused_by_name(place: str, value: Any) -> None:
    group, _, key = place.rpartition(".")
    try:
        options = ImportanceOptions.of(config_values({group: {key: value}}))
    except ValueError as error:
        said = str(error)
    else:
        said = place
        assert isinstance(options.at(place), type(DEFAULTS[place]))
    assert place in said
