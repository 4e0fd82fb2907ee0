"""Messages as bytes, the sockets that carry them, and the thread that does it."""

from gossipjax.asynchronous.transport._encoding import Format, narrow
from gossipjax.asynchronous.transport._service import Service

__all__ = ["Format", "Service", "narrow"]
