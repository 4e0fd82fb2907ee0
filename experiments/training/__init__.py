"""Training programs: a task is one class, and everything else that such a program needs is here.

- task: the protocol of a task.
- options, checks: the options that all programs share.
- algorithms, topologies, optimizers: what can be chosen by name.
- placement: where nodes run.
- plan, experiment: from options to runs, and all that can fail before training.
- train, trainer, evaluation, resume, prefetch, progress: a run.
- output: its files.
- main: `run_program`, the `main` of every training program.
"""
