"""The protocol of nodes that wait for nobody: no sockets, no clocks, no threads."""

from gossipjax.asynchronous.protocol._mass import Mass
from gossipjax.asynchronous.protocol._messages import KINDS, Identity, Message, View
from gossipjax.asynchronous.protocol._participant import Participant
from gossipjax.asynchronous.protocol._peers import choose_exponential

__all__ = ["KINDS", "Identity", "Mass", "Message", "Participant", "View", "choose_exponential"]
