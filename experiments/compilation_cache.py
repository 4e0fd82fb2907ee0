"""Lets the processes of an experiment share compiled programs."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Lets all processes, also after a restart, read programs that one process has compiled."""
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    with tempfile.TemporaryDirectory(
        prefix="gossipjax-cache-", ignore_cleanup_errors=True
    ) as folder:
        variables = dict(zip(names, (folder, "0"), strict=True))
        with mock.patch.dict(os.environ, variables):
            yield
