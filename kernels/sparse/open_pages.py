"""The pages that requests are filling: each stays in a frame on the device until it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_importance_kernels.sparse.upload import upload


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where the new tokens of one forward pass go, alike in every layer; all tensors are int64.

    A page whose tokens all come in this pass goes to the host without a frame.

    Attributes:
        to_host: [tokens] rows of the pass whose page comes whole, page by page.
        whole: [pages] those pages.
        to_frames: [tokens] the other rows, without padding.
        frame_locations: [tokens] their locations among the frames: frame times page size plus offset.
        reopened: [pages] whose first tokens lie on the host only, and
        reopened_frames: [pages] the frames that they go on in.
        completed: [pages] whose last token this pass writes to a frame, and
        completed_frames: [pages] those frames.
    """

    to_host: torch.Tensor
    whole: torch.Tensor
    to_frames: torch.Tensor
    frame_locations: torch.Tensor
    reopened: torch.Tensor
    reopened_frames: torch.Tensor
    completed: torch.Tensor
    completed_frames: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Where the new tokens of a decode step go, one a row; tensors are int64 [rows] but for ``is_reopened``.

    Attributes:
        pages: -1 for padding.
        offsets: of the token in its page.
        frames: of the page, -1 for padding.
        is_reopened: whether the first tokens of the page lie on the host only, bool.
    """

    pages: torch.Tensor
    offsets: torch.Tensor
    frames: torch.Tensor
    is_reopened: torch.Tensor


class OpenPages:
    """Which page is in which frame. A frame has the same number in each layer.

    Args:
        num_frames: frames, one for each request that may run.
        num_pages: logical pages of the pool. Page 0 is what padding is written to: it is never kept.
        page_size: tokens per page.
        device: where the tables are.
    """

    def __init__(self, num_frames: int, num_pages: int, page_size: int, device: torch.device | str) -> None:
        self.page_size = page_size
        self.frame_of = torch.full((num_pages,), -1, dtype=torch.int64, device=device)
        self.page_in = torch.full((num_frames,), -1, dtype=torch.int64, device=device)
        self._completed = self.page_in[:0]
        self._completed_frames: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Device bytes of the tables."""
        return self.frame_of.nbytes + self.page_in.nbytes

    def plan(self, locations: torch.Tensor) -> WritePlan:
        """Opens the pages that a pass begins, and closes those that the pass before completed.

        Args:
            locations: of the pass's new tokens, int64 [tokens]; those of a page are consecutive and ascend.

        Raises:
            AssertionError: there are more open pages than frames.
        """
        self.close_completed()
        size = self.page_size
        pages, page_of_row, counts = torch.unique_consecutive(
            locations // size, return_inverse=True, return_counts=True
        )
        begins = locations[counts.cumsum(0) - counts] % size
        ends = begins + counts
        assert bool(((ends <= size) | (pages == 0)).all()), "tokens of a page are not consecutive"
        is_whole = (counts == size) & (pages > 0)
        is_part = ~is_whole & (pages > 0)

        part = pages[is_part]
        frames = self.frame_of[part]
        unopened = frames < 0
        free = (self.page_in < 0).nonzero().flatten()
        opening = part[unopened]
        assert len(opening) <= len(free), (
            f"{len(opening)} more open pages, {len(free)} of {len(self.page_in)} frames free"
        )
        frames[unopened] = free[: len(opening)]
        self.frame_of[opening] = frames[unopened]
        self.page_in[frames[unopened]] = opening

        reopened = unopened & (begins[is_part] > 0)
        completed = ends[is_part] == size
        self._completed = part[completed]
        to_host = is_whole[page_of_row].nonzero().flatten()
        to_frames = is_part[page_of_row].nonzero().flatten()
        in_frames = locations[to_frames]
        return WritePlan(
            to_host=to_host,
            whole=pages[is_whole],
            to_frames=to_frames,
            frame_locations=self.frame_of[in_frames // size] * size + in_frames % size,
            reopened=part[reopened],
            reopened_frames=frames[reopened],
            completed=part[completed],
            completed_frames=frames[completed],
        )

    def plan_step(self, locations: torch.Tensor, completed: Sequence[int]) -> StepPlan:
        """As ``plan`` for one token a row; nothing waits for the device, so frames that lack are not noticed.

        Args:
            locations: int64 [rows], each of a page of its own; 0 for padding.
            completed: rows whose token is the last of its page.
        """
        self.close_completed()
        pages, offsets = locations // self.page_size, locations % self.page_size
        is_page = pages > 0
        frames = torch.where(is_page, self.frame_of[pages], -1)
        is_new = is_page & (frames < 0)
        free = (self.page_in >= 0).long().sort(stable=True).indices
        order = (is_new.cumsum(0) - 1).clamp(min=0, max=len(free) - 1)
        frames = torch.where(is_new, free[order], frames)
        self.frame_of[pages] = frames
        # A free frame holds -1. Padding adds nothing to the first one.
        self.page_in.index_add_(0, frames.clamp(min=0), torch.where(is_new, pages + 1, 0))
        if completed:
            rows = upload(completed, locations.device)
            self._completed, self._completed_frames = pages[rows], frames[rows]
        return StepPlan(torch.where(is_page, pages, -1), offsets, frames, is_new & (offsets > 0))

    def close_completed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Closes what the pass before completed.

        Returns:
            Pages that ``plan_step`` saw completed, 0 for those that were freed since, and the frames that
            hold them until the next plan; int64 [pages] each, None for none.
        """
        pages, frames = self._completed, self._completed_frames
        self._completed, self._completed_frames = self.page_in[:0], None
        if frames is None:
            if len(pages):
                self.close(pages)
            return None
        # Each frame holds its page unless that was freed since. Padding has none, and adds 0 to the first.
        is_held = (frames >= 0) & (self.frame_of[pages] == frames)
        self.page_in.index_add_(0, frames.clamp(min=0), torch.where(is_held, -1 - pages, 0))
        self.frame_of[pages] = torch.where(is_held, -1, self.frame_of[pages])
        return torch.where(is_held, pages, 0), frames

    def close(self, pages: torch.Tensor) -> None:
        """Gives the frames of these pages back; pages without one are passed over."""
        frames = self.frame_of[pages]
        self.page_in[frames[frames >= 0]] = -1
        self.frame_of[pages] = -1

    def open(self, among: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages in frames, and those frames; int64 [pages] each.

        Args:
            among: pages that are asked about, int64 [any number]; None for all.
        """
        if among is None:
            frames = (self.page_in >= 0).nonzero().flatten()
        else:
            frames = self.frame_of[among]
            frames = frames[frames >= 0]
        return self.page_in[frames], frames

    def clear(self) -> None:
        """Closes every page."""
        self.frame_of.fill_(-1)
        self.page_in.fill_(-1)
        self._completed, self._completed_frames = self.page_in[:0], None

    def check_integrity(self) -> None:
        """Raises AssertionError unless both tables say the same."""
        pages, frames = self.open()
        assert torch.equal(self.frame_of[pages], frames)
        assert int((self.frame_of >= 0).sum()) == len(pages)
