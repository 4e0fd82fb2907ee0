"""Papers after SGP: RAND-PSGD, RelaySGD, SlowMo, DiLoCo, and Adam-SGP on translation.

- samples: what a run says of a method, over its seeds, as values and as text.
- curves: figures of metrics over steps and over settings.
- slowmo, relaysgd, diloco, rand20, translation: a section each.
"""
