"""The emitting FlashInfer backend: upstream's own backend code, over a stand-in for FlashInfer's kernels.

What is tested is ours: what the kernels are handed, whom a step observes, and the rows. That the compiled
kernels do what the stand-in does is for test_flashinfer_hook.py, and for a GPU.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

import sglang_importance.attention.decode_emission as decode_emission
from sglang_importance.attention.rows import Phase

from support.doubles import flashinfer_double
from support.doubles.twins import Mutation, broken_twin
from support.drivers.attention_driver import options
from support.drivers.flashinfer_driver import FlashInferDriver, install_double
from support.drivers.triton_driver import Sequence, runtime_context
from support.flashinfer_source import flashinfer_package
from support.nightly_cases import rest_nightly

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's pools are on the CPU"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    override = runtime_context()
    with pytest.MonkeyPatch.context() as patch:
        install_double(patch)
        yield
    override.restore()


def test_prefill_and_decode_of_a_ragged_batch() -> None:
    driver = FlashInferDriver(options(interval=2, layers=(0, 2)), page_size=4)
    short, long = Sequence("a", 1), Sequence("b", 3)
    driver.extend((short, 3), (long, 41))
    for _ in range(3):
        driver.decode(short, long)
    driver.check_row(short, Phase.PREFILL, [0, 1, 2], layers=(0, 2))
    driver.check_row(long, Phase.PREFILL, [37, 38, 39, 40], layers=(0, 2))
    driver.check_row(short, Phase.DECODE, [3, 5], layers=(0, 2))
    driver.check_row(long, Phase.DECODE, [41, 43], layers=(0, 2))


def test_requests_are_told_apart_by_their_starts() -> None:
    driver = FlashInferDriver(options(interval=3), page_size=1)
    first, second, third = Sequence("a", 3), Sequence("b", 1), Sequence("c", 2)
    driver.extend((first, 9), (second, 5), (third, 7))
    driver.decode(first)
    driver.decode(second, first, third)
    driver.decode(third, second)
    driver.check_row(first, Phase.DECODE, [9])
    driver.check_row(second, Phase.DECODE, [5])
    driver.check_row(third, Phase.DECODE, [7])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutation",
    [
        Mutation(
            "order_for_batch_row",
            "numbers.batch_rows[:count] = batch_rows",
            "numbers.batch_rows[:count] = range(count)",
        ),
        Mutation(
            "one_start_for_all",
            "numbers.batch_starts[batch_rows] = starts",
            "numbers.batch_starts[batch_rows] = 0",
        ),
    ],
    ids=str,
)
def test_broken_twins_are_told_apart(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_importance.attention import flashinfer

    twin = broken_twin(decode_emission, mutation, tmp_path)
    monkeypatch.setattr(flashinfer.FlashInferEmission, "_name", twin.DecodeEmission._name)
    driver = FlashInferDriver(options(interval=3, layers=(1,)), page_size=4)
    first, second, third = Sequence("a", 3), Sequence("b", 1), Sequence("c", 2)
    driver.extend((first, 9), (second, 5), (third, 7))
    driver.decode(first)
    driver.decode(first, second, third)
    with pytest.raises(AssertionError):
        driver.check_row(third, Phase.DECODE, [7], layers=(1,))


def test_half_precision_logits_keep_their_bound() -> None:
    driver = FlashInferDriver(options(), page_size=4, logit_dtype=torch.float16)
    driver.atol = 2e-2
    sequence = Sequence("a", 1)
    driver.extend((sequence, 30))
    driver.decode(sequence)
    driver.rows.consume(1, Phase.PREFILL)
    driver.check_row(sequence, Phase.DECODE, [30])
    assert driver.backend.emission.step.logits.dtype == torch.float16


def test_requests_beyond_the_budget_are_observed_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_importance.attention import flashinfer

    monkeypatch.setattr(flashinfer, "MAX_EMITTED_BYTES", 4 * 4 * 100)
    driver = FlashInferDriver(options(interval=2, layers=(1,)), page_size=4)
    first, second = Sequence("a", 1), Sequence("b", 3)
    driver.extend((first, 60), (second, 60))
    driver.decode(first, second)
    driver.decode(first, second)
    driver.check_row(first, Phase.DECODE, [60], layers=(1,))
    driver.check_row(second, Phase.DECODE, [61], layers=(1,))


def closed(driver: FlashInferDriver) -> None:
    driver.rows.close()


def failed(driver: FlashInferDriver) -> None:
    driver.rows.attempt(lambda: 1 // 0)


def fails_on_the_way(driver: FlashInferDriver) -> None:
    emission, opened = driver.backend.emission, driver.backend.emission.opened

    def fail() -> None:
        emission.opened = opened
        raise ValueError("planned")

    emission.opened = fail


@pytest.mark.parametrize("end", rest_nightly([fails_on_the_way, closed, failed]))
def test_no_kernel_gets_the_starts_of_another_batch_once_learning_has_ended(
    end: Callable[[FlashInferDriver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_importance.attention import flashinfer

    monkeypatch.setattr(flashinfer, "MAX_EMITTED_BYTES", 4 * 4 * 100)
    driver = FlashInferDriver(options(interval=2, layers=(1,)), page_size=4)
    emission = driver.backend.emission
    first, second, third = Sequence("a", 1), Sequence("b", 3), Sequence("c", 2)
    driver.extend((first, 40), (second, 50), (third, 60))
    driver.decode(first, second)
    numbers = emission.numbers
    assert numbers.batch_starts[:2].tolist() == [0, 41]
    end(driver)
    driver.decode(first, third)  # whose 61 tokens from 41 on the buffer of 100 does not hold
    assert numbers.batch_starts.tolist() == numbers.order.tolist() == [-1] * emission.max_batch
    assert not driver.rows.is_open


def test_a_pass_that_is_no_decode_step_names_nobody() -> None:
    driver = FlashInferDriver(options(layers=(1,)), page_size=4)
    first, second = Sequence("a", 1), Sequence("b", 3)
    driver.extend((first, 9))
    driver.decode(first)
    assert driver.backend.emission.numbers.batch_starts[0] == 0
    driver.extend((second, 5))
    assert (driver.backend.emission.numbers.batch_starts == -1).all()
    driver.check_row(first, Phase.DECODE, [9], layers=(1,))


def test_the_kernels_are_handed_what_jit_args_announce() -> None:
    driver = FlashInferDriver(options(layers=(1,)), page_size=4)
    sequence = Sequence("a", 1)
    driver.extend((sequence, 6))
    driver.decode(sequence)
    (wrapper,) = driver.backend.decode_wrappers
    emission = driver.backend.emission
    assert wrapper.jit_args[7] == ["emit_logits", "emit_starts"]
    assert not wrapper.use_tensor_cores, "a group of 2 decodes on CUDA cores"
    starts = [call[1] for call in wrapper.calls]
    assert [bool((start >= 0).any()) for start in starts] == [False, True, False]
    assert starts[1].data_ptr() == emission.numbers.batch_starts.data_ptr(), "a graph holds the address"
    assert [call[2] for call in wrapper.calls] == [pytest.approx(8**-0.5)] * 3


def test_captured_batches_get_wrappers_over_upstream_s_buffers() -> None:
    driver = FlashInferDriver(options(layers=(1,)), page_size=4)
    backends = driver.backend, driver.stock
    for backend in backends:
        backend.init_cuda_graph_state(3, 3)
    (ours,), (stock,) = (backend._create_decode_wrappers(2, 2) for backend in backends)
    assert ours.is_cuda_graph_enabled
    (first,) = driver.backend.decode_wrappers
    assert first.jit_args is not None
    assert ours.jit_args is None, "the kernels are built once"
    assert ours._jit_module is first._jit_module
    assert stock._jit_module is None
    for name in ("indptr", "indices", "last_page_len"):
        mine, theirs = (getattr(wrapper, f"_paged_kv_{name}_buf") for wrapper in (ours, stock))
        assert mine.shape == theirs.shape
    with pytest.raises(AssertionError):
        driver.backend._create_decode_wrappers(9, 9)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        ({"logit_cap": 30.0}, "do not support a logit soft cap: use --kv-importance-source qk_probe"),
    ],
)
def test_what_stock_and_ours_would_do_differently_is_refused(attention: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FlashInferDriver(options(), page_size=4, **attention)


def test_a_context_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_importance.attention import flashinfer

    monkeypatch.setattr(flashinfer, "MAX_EMITTED_BYTES", 4 * 4 * 95)
    with pytest.raises(ValueError, match=r"logits of 96 tokens in 1 layers .* lower --context-length"):
        FlashInferDriver(options(layers=(1,)), page_size=4)


def test_our_wrapper_calls_flashinfer_as_it_is() -> None:
    """The double's signatures are FlashInfer's, read from its source where it is at hand."""
    package = flashinfer_package()
    if package is None:
        pytest.skip(
            "needs FlashInfer's source: scripts/setup.sh --with-tests fetches it where there is an nvcc"
        )
    tree = ast.parse((package / "decode.py").read_text())
    (real,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "BatchDecodeWithPagedKVCacheWrapper"
    )
    for name in ("__init__", "run"):
        *_, method = (node for node in real.body if isinstance(node, ast.FunctionDef) and node.name == name)
        names = {argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)}
        ours = inspect.signature(getattr(flashinfer_double.DecodeWrapper, name)).parameters.values()
        positional = {p.name for p in ours if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD}
        assert positional <= names, positional - names
        assert name != "run" or method.args.vararg is not None
        if name == "__init__":
            assert _set_with_kernels(method) == {"_jit_module", "_jit_additional_tensor_names"}


def _set_with_kernels(constructor: ast.FunctionDef) -> set[str]:
    """Attributes that FlashInfer's constructor sets where it is handed ``jit_args``, and ours without."""
    sets = [
        attribute.attr
        for branch in constructor.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "jit_args is not None"
        for attribute in ast.walk(branch)
        if isinstance(attribute, ast.Attribute) and isinstance(attribute.ctx, ast.Store)
    ]
    return set(sets)
