"""The emitting hook's index arithmetic and guards, compiled for the host and driven as by FlashInfer."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import astuple, dataclass, replace
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_importance_kernels.flashinfer import SOURCE, EmittingDecode

from support.doubles.twins import Mutation
from support.nightly_cases import rest_nightly

COMPILER = shutil.which("g++") or shutil.which("clang++")
DRIVER = Path(__file__).with_name("hook_driver.cpp")

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@dataclass(frozen=True)
class Launch:
    """One decode step; ``chunk`` 0 means that the sequences are not split."""

    tensor_cores: bool
    soft_cap: bool
    group: int
    kv_heads: int
    chunk: int
    tile: int
    page_size: int
    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    def stored(self, program: Path) -> np.ndarray:
        """Every place of the logits: what it holds and how often it was stored to, [places, 2]."""
        *numbers, lengths, starts = astuple(self)
        numbers += chain.from_iterable(zip(lengths, starts, strict=True))
        command = [str(program), *(str(int(number)) for number in numbers)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return np.array(run.stdout.split(), dtype=np.float64).reshape(-1, 2)

    def expected(self) -> np.ndarray:
        requests = list(zip(self.lengths, self.starts, strict=True))
        end = max(0, *(start + length for length, start in requests))
        logits = np.full((self.kv_heads, end + 3, self.group), -1.0)
        stores = np.zeros_like(logits)
        for request, (length, start) in enumerate(requests):
            if start < 0:
                continue
            head, token, g = np.ogrid[: self.kv_heads, :length, : self.group]
            names = 0.5 * (request * 100_000 + head * 10_000 + g * 1000 + token)
            if self.soft_cap:
                names = 1e6 * np.tanh(names / 1e6)
            limit = 65504.0  # The largest half: the hook saturates.
            logits[:, start : start + length] = np.clip(names, -limit, limit)
            stores[:, start : start + length] = 1
        return np.stack([logits.ravel(), stores.ravel()], axis=1)


def compiled(folder: Path, source: Path = SOURCE) -> Path:
    assert COMPILER is not None
    program = folder / f"{source.stem}.out"
    command = [COMPILER, "-std=c++17", "-O1", f'-DEMIT_SOURCE="{source}"', str(DRIVER), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    return program


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("hook"))


@needs_compiler
@settings(max_examples=60, deadline=None, database=None)
@given(
    launch=st.builds(
        Launch,
        tensor_cores=st.booleans(),
        soft_cap=st.booleans(),
        group=st.integers(1, 8),
        kv_heads=st.integers(1, 3),
        chunk=st.sampled_from([0, 1, 5, 16, 40]),
        tile=st.sampled_from([4, 16, 24]),
        page_size=st.sampled_from([1, 4]),
        lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3).map(tuple),
        starts=st.just(()),
    ),
    observed=st.lists(st.booleans(), min_size=3, max_size=3),
    gap=st.integers(0, 5),
)
def test_every_logit_lies_in_its_place_and_no_other(
    launch: Launch, observed: list[bool], gap: int, hook: Path
) -> None:
    starts, end = [], gap
    for length, is_observed in zip(launch.lengths, observed, strict=False):
        starts.append(end if is_observed else -1)
        end += length if is_observed else 0
    launch = replace(launch, starts=tuple(starts))
    np.testing.assert_allclose(launch.stored(hook), launch.expected(), rtol=1e-6)


CUDA_CORES = Launch(
    tensor_cores=False,
    soft_cap=False,
    group=4,
    kv_heads=2,
    chunk=10,
    tile=16,
    page_size=4,
    lengths=(37, 21),
    starts=(21, 0),
)
TENSOR_CORES = replace(CUDA_CORES, tensor_cores=True)
UNOBSERVED = replace(CUDA_CORES, lengths=(21, 37), starts=(-20, 0))
LARGE = replace(CUDA_CORES, lengths=(37, 37, 37), starts=(0, 37, 74))

START = "params.emit_starts[batch_idx];"
TWINS = [
    (CUDA_CORES, Mutation("stale_split", "params.partition_kv)", "false)")),
    (TENSOR_CORES, Mutation("padded_rows", "qo_idx == 0 &&", "true &&")),
    (CUDA_CORES, Mutation("one_head_swapped", "g = qo_head_idx - kv", "g = (qo_head_idx ^ 1) - kv")),
    (CUDA_CORES, Mutation("next_request", START, "params.emit_starts[1 - batch_idx];")),
    (CUDA_CORES, Mutation("two_tokens_off", START, f"2 + {START}")),
    (UNOBSERVED, Mutation("negative_is_zero", START, f"std::max(0, {START[:-1]});")),
    (CUDA_CORES, Mutation("no_scale", "static_cast<float>(params.sm_scale);", "1.f;")),
    (CUDA_CORES, Mutation("first_kv_head_only", "params.emit_kv_head_stride * kv_head_idx", "0")),
    (CUDA_CORES, Mutation("every_lane_stores", "threadIdx.x == 0 &&", "true &&")),
    (LARGE, Mutation("no_saturation", "65504.f", "1e9f")),
]


@needs_compiler
@pytest.mark.parametrize(
    ("launch", "mutation"), rest_nightly(TWINS, daily=2), ids=[mutation.name for _, mutation in TWINS]
)
def test_broken_hooks_are_told_apart(launch: Launch, mutation: Mutation, tmp_path: Path, hook: Path) -> None:
    np.testing.assert_allclose(launch.stored(hook), launch.expected(), rtol=1e-6)
    text = SOURCE.read_text()
    assert text.count(mutation.old) == 1, mutation.name
    source = tmp_path / "twin.cuh"
    source.write_text(text.replace(mutation.old, mutation.new))
    assert not np.allclose(launch.stored(compiled(tmp_path, source)), launch.expected(), rtol=1e-6)


def test_different_kernels_have_different_names() -> None:
    choices: dict[str, tuple[object, ...]] = {
        "head_dim": (64, 128, 256),
        "dtype": (torch.bfloat16, torch.float16),
        "kv_dtype": (torch.bfloat16, torch.float16, torch.float8_e4m3fn),
        "logit_dtype": (torch.float16, torch.float32),
        "tensor_cores": (False, True),
        "soft_cap": (False, True),
    }
    forms = [
        EmittingDecode(**dict(zip(choices, values, strict=True))) for values in product(*choices.values())
    ]
    assert len({form.uri for form in forms}) == len(forms)


def test_jit_args_name_the_variant_that_the_source_defines() -> None:
    arguments = EmittingDecode(tensor_cores=True, soft_cap=False).jit_args()
    assert arguments[11] == "EmitLogits<true, false>"
    assert "struct EmitLogits : AttentionVariantBase" in arguments[12]
    assert all(f"params.{name}" in arguments[12] for name in (*arguments[7], *arguments[9]))


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        ({"head_dim": 96}, "heads of dimension 96"),
        ({"kv_dtype": torch.float8_e5m2}, "keys in torch.float8_e5m2"),
        ({"dtype": torch.float32}, "queries in torch.float32"),
        ({"logit_dtype": torch.bfloat16}, "logits in torch.bfloat16"),
    ],
)
def test_kernels_that_do_not_exist_are_refused(unknown: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EmittingDecode(**unknown)
