"""Addresses of PostgreSQL, as libpq takes them, but without passwords."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("postgresql://", "postgres://")
EXAMPLE = "postgresql://user@host:5432/database"
_SECRETS = ("password", "sslpassword", "oauth_client_secret")


def is_postgres_url(text: str) -> bool:
    """Whether this names a database, and no directory."""
    return text.startswith(SCHEMES)


def url_problem(text: str) -> str | None:
    """Why a URL cannot be used, in words that do not repeat it; None where nothing speaks against it."""
    if not is_postgres_url(text):
        return f"is the address of no PostgreSQL: give a directory, or one such as {EXAMPLE}"
    if not text.isprintable():
        return f"holds what does not print: give an address such as {EXAMPLE}"
    try:
        parts = urlsplit(text)
        named = [name for name, _ in parse_qsl(parts.query)]
    except ValueError:
        return f"is no address: give one such as {EXAMPLE}"
    user, _, hosts = parts.netloc.rpartition("@")
    if ":" in user or any(name in _SECRETS for name in named) or _may_hide_a_password(text, hosts):
        return (
            "holds a password, which sglang would log and every list of processes show: leave it out, and "
            "give it as PGPASSWORD or in a file of passwords (PGPASSFILE, ~/.pgpass)"
        )
    return None


def _may_hide_a_password(text: str, hosts: str) -> bool:
    """Whether what stands as a port may be the beginning of a password with a "/", "?" or "#" in it.

    Libpq would take the user for the host, and write the port that it cannot read into its error.
    """
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")]
    parts = urlsplit(text)
    is_cut = any(ports) and "@" in parts.path + parts.fragment
    return is_cut or any(port and not port.isdigit() for port in ports)
