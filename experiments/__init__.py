"""Programs that train and measure with gossipjax, and what they share.

All of them, and the processes that they start, keep compiled programs in `~/.cache/gossipjax`, or
in the folder `JAX_COMPILATION_CACHE_DIR`. A second run then starts sooner.
"""

import os

# Before JAX is imported: it reads them then.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/gossipjax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
