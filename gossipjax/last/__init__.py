"""Whether the update that a gossip returned is what the parameters are moved by.

A gossip transform mixes models, so its update is not a direction: nothing may scale, sum or clip it
any more. The transform marks the parameters that it was given and the updates that it returns, by
names in the traced program, of which the compiled one has nothing. `require_applied` then follows
the updates: each must be added to its parameter as it is, be a result of the program, or be taken
by another transform, which says so by a mark.
"""

from gossipjax.last._follow import require_applied
from gossipjax.last._marks import (
    APPLIED,
    DESCENDED,
    GRADIENTS,
    PARAMS,
    UPDATES,
    mark,
    takes_gradients,
)

__all__ = [
    "APPLIED",
    "DESCENDED",
    "GRADIENTS",
    "PARAMS",
    "UPDATES",
    "mark",
    "require_applied",
    "takes_gradients",
]
