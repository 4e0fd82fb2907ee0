"""Other methods than SGP on images: a section for each.

RAND-PSGD, RelaySGD, SlowMo, DiLoCo, and Adam-SGP on translation.
"""
