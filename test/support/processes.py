"""Processes that a test has started, found by their session."""

from __future__ import annotations

import os

import psutil


def session_members(session: int) -> list[psutil.Process]:
    """Processes of a session that run, parents before their children."""
    return [process for process in psutil.process_iter() if _session_of(process) == session]


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none of a process that has ended since it was listed."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _session_of(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (OSError, psutil.Error):
        return None
