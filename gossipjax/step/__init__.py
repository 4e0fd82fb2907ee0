"""The step of a training loop: gradients, update and exchange of all nodes.

- train_step: `TrainStep`, one compiled program per round.
- beside: an exchange that is a separate program, on a thread.
- buckets: gradients in several programs, averaged one after another on a thread.
- offloaded: state that waits in the host's memory until a step needs it.
- closed: a step that contains its optimizer, `gx.decentralize`.
- batch_stats: statistics that are not parameters.
- bytes_per_step: what a step sends.
"""

__all__: list[str] = []
