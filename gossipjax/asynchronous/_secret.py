"""The secret by which the processes of a job know each other, and the keys made from it."""

from __future__ import annotations

import hashlib
import ipaddress
import os

MIN_LENGTH = 16
VARIABLE = "GOSSIPJAX_SECRET"


def secret_from_env() -> str | None:
    """Returns the secret of the job, which is in `GOSSIPJAX_SECRET`; None if it is not set.

    Raises:
      ValueError: if the secret has fewer than 16 characters.

    >>> from unittest import mock
    >>> with mock.patch.dict(os.environ, {"GOSSIPJAX_SECRET": "a text that is long"}):
    ...     secret_from_env()
    'a text that is long'
    """
    secret = os.environ.get(VARIABLE)
    require_secret(secret, VARIABLE)
    return secret


def require_secret(secret: str | None, name: str) -> None:
    """Raises `ValueError` if a secret is given and is too short."""
    if secret is not None and len(secret) < MIN_LENGTH:
        raise ValueError(
            f"{name} must have {MIN_LENGTH} characters or more, got {len(secret)}: who hears a "
            "message could try all that are shorter. Give all processes the same line of "
            "`openssl rand -hex 32`, or no secret."
        )


def make_key(secret: str, purpose: str) -> bytes:
    """Makes a key of 32 bytes from the secret, another one for each purpose.

    >>> make_key("a text that is long", "a purpose").hex()[:16]
    '78d0cf7c08b8d4dc'
    """
    # This is slow on purpose (about 50 ms), so that nobody can try a dictionary.
    text = secret.encode(errors="surrogateescape")
    return hashlib.scrypt(text, salt=f"gossipjax {purpose}".encode(), n=1 << 14, r=8, p=1, dklen=32)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host.

    >>> is_loopback("127.0.0.1"), is_loopback("[::1]"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # `host` is a name
        return False
