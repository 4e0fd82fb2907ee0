"""The launcher: it starts the processes of a job, watches them, and starts them again."""

from gossipjax.launch.supervisor._independent import ADDRESSES, PLACE, supervise_each
from gossipjax.launch.supervisor._progress import advance, enable_stacks
from gossipjax.launch.supervisor._signals import signal_handlers
from gossipjax.launch.supervisor._stall import StallLimits
from gossipjax.launch.supervisor._supervisor import JobSpec, RestartPolicy, StartError, supervise
from gossipjax.launch.supervisor._worker import MALLOC_ENVIRONMENT

__all__ = [
    "ADDRESSES",
    "MALLOC_ENVIRONMENT",
    "PLACE",
    "JobSpec",
    "RestartPolicy",
    "StallLimits",
    "StartError",
    "advance",
    "enable_stacks",
    "signal_handlers",
    "supervise",
    "supervise_each",
]
