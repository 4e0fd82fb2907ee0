"""Compiled programs that the processes of an experiment share."""

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Lets all processes, after each restart too, read the programs that one has compiled."""
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(
        prefix="gossipjax-cache-", ignore_cleanup_errors=True
    ) as folder:
        os.environ.update(zip(names, (folder, "0"), strict=True))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
