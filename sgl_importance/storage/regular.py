"""Files that somebody else may have put where one of ours belongs: opened without ever waiting for them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from sgl_importance.errors import ImportanceError


class NotRegular(ImportanceError, OSError):
    """There is something at the path, and it is no regular file: a pipe, a device, a link."""


def open_regular(path: str | Path) -> int:
    """Opens a regular file for reading; a pipe or a device would keep its reader waiting, a link lead away.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        NotRegular: it is none.
        OSError: it cannot be opened.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
            raise NotRegular(error.errno, os.strerror(error.errno), str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NotRegular(errno.EINVAL, "no regular file", str(path))
    return file
