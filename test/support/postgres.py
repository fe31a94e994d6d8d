"""A PostgreSQL of our own, where its programs are installed: in a temporary folder, on a socket there."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.waiting import wait_until

PORT = 5432  # of a socket in a folder that nobody else has
_SETTINGS = (
    *("listen_addresses=", "fsync=off", "full_page_writes=off"),
    *("shared_buffers=16MB", "max_connections=40", "autovacuum=off"),
)


def programs() -> Path | None:
    """The folder of ``initdb`` and ``postgres``; None where they are not installed."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


class Postgres:
    """A server that can be stopped and started again. It demands a password, which the environment holds.

    Args:
        folder: empty, with a short name, as sockets need; its owner runs the server.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.password = secrets.token_hex(8)
        self.url = f"postgresql://ledger@/postgres?host={folder}&port={PORT}"
        self._programs = programs()
        assert self._programs is not None
        # It refuses to run as root.
        self._user = None if os.getuid() else _some_user()
        if self._user is not None:
            shutil.chown(folder, self._user)
        secret = folder / "password"
        secret.write_text(self.password)
        if self._user is not None:
            shutil.chown(secret, self._user)
        subprocess.run(
            [
                *(self._programs / "initdb", "--pgdata", folder / "data", "--username", "ledger"),
                *("--auth", "scram-sha-256", "--pwfile", secret, "--no-sync", "--encoding", "UTF8"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            user=self._user,
        )
        self.start()

    def start(self) -> None:
        assert self._programs is not None
        settings = [word for each in _SETTINGS for word in ("-c", each)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder, *settings],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                user=self._user,
            )
        wait_until(self._answers)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """At once, as in a crash; what is written stays."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()

    def forget(self) -> None:
        """Drops what ledgers have left."""
        self.execute("DROP SCHEMA IF EXISTS sgl_importance CASCADE")

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """As somebody else would who has the database, with the ledger's schema first."""
        import psycopg

        options = "-c search_path=sgl_importance,public"
        with psycopg.connect(self.url, autocommit=True, password=self.password, options=options) as server:
            cursor = server.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _answers(self) -> bool:
        import psycopg

        assert self._process.poll() is None, (self.folder / "log").read_text()
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    """A running server, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    server = None
    try:
        server = Postgres(folder)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder)


def _some_user() -> str:
    names = {each.pw_name for each in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)
