"""What a step would ask of a device, counted on a CPU: launches, and times that the host waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ALLOCATES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_")
_READS_BACK = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose result, or whose result's shape, the host needs before it goes on."""
_INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")


class DeviceCounts(TorchDispatchMode):
    """Takes every tensor for one of a device, but those that ``on_host`` was told of, and theirs.

    Triton's kernels are counted and left out: what is counted may not hang on what they would have written.

    An operation of torch counts as one launch, though sorting, say, takes several kernels; views and
    allocations count as none. A copy between host and device cannot be told on a CPU, except from a host
    tensor by ``to``: one launch, and a wait unless it is ``non_blocking``.

    Attributes:
        launches: by operation; Triton's kernels under ``triton``.
        syncs: by what makes the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._host: list[torch.UntypedStorage] = []  # held, so that no address is used again

    def on_host(self, *tensors: torch.Tensor) -> None:
        """These are in host memory: who reads them waits for nobody."""
        self._host += [tensor.untyped_storage() for tensor in tensors]

    def _is_host(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(storage.data_ptr() == address for storage in self._host)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._can_decompose():  # in inference mode it comes whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        if given and all(map(self._is_host, given)):
            self.on_host(*made)
            return result
        if name == "lift_fresh":  # a number that is assigned: filled in by the device
            self.launches["fill"] += 1
            return result
        if name in _INDEXES:
            if any(part.dtype in (torch.bool, torch.uint8) for part in _indices(args)):
                self.syncs[f"{name} by bool"] += 1
        elif _READS_BACK & set(func.tags):
            self.syncs[name] += 1
        if launches(func) and not (made and all(part.numel() == 0 for part in made)):
            self.launches[name] += 1
        return result

    @contextmanager
    def counting(self) -> Iterator[DeviceCounts]:
        """Counts what is done inside."""
        with ExitStack() as stack:
            for name in ("tolist", "numpy"):
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._reading(name)))
            stack.enter_context(mock.patch.object(torch.Tensor, "to", self._moving()))
            stack.enter_context(mock.patch.object(torch, "tensor", self._listed()))
            if (executor := triton_executor()) is not None:
                stack.enter_context(mock.patch.object(executor, "__call__", self._launching()))
            stack.enter_context(self)
            yield self

    def _reading(self, name: str) -> Any:
        read = getattr(torch.Tensor, name)

        def reading(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_host(tensor):
                self.syncs[name] += 1
            return read(tensor, *args, **kwargs)

        return reading

    @staticmethod
    def _names_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return "device" in kwargs or bool(args and isinstance(args[0], str | torch.device))

    def _moving(self) -> Any:
        move = torch.Tensor.to

        def moving(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if not self._names_device(args, kwargs) or not self._is_host(tensor):
                return move(tensor, *args, **kwargs)
            self.launches["copy to the device"] += 1
            if not kwargs.get("non_blocking"):
                self.syncs["copy to the device"] += 1
            with _disable_current_modes():
                return move(tensor.clone(), *args, **kwargs)

        return moving

    def _listed(self) -> Any:
        make = torch.tensor

        def listed(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("device") is not None:
                self.launches["copy of a list"] += 1
                self.syncs["copy of a list"] += 1
                with _disable_current_modes():
                    return make(*args, **kwargs)
            with _disable_current_modes():
                made = make(*args, **kwargs)
            self.on_host(made)
            return made

        return listed

    def _launching(self) -> Any:
        def launching(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.launches["triton"] += 1

        return launching


def triton_executor() -> Any:
    """What launches kernels in Triton's interpreter; None where that is not on."""
    import os

    if os.environ.get("TRITON_INTERPRET") != "1":
        return None
    from triton.runtime.interpreter import GridExecutor

    return GridExecutor


def launches(func: Any) -> bool:
    """Whether an operation does work on a device; views and allocations do none."""
    is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
    return not is_view and func.overloadpacket.__name__ not in _ALLOCATES


def _indices(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [part for part in args[1] if part is not None] if len(args) > 1 else []


def leaves(tree: Any) -> Iterator[Any]:
    """What stands in lists, tuples and dicts, however deep."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree
