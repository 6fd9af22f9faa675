"""rlctl: the contract, algorithms and trainers of an RL post-training toolkit whose backends are plugins.

Importing this package imports no torch. The contract lives in :mod:`rlctl.hookspecs`.
"""

__version__ = "0.1.0"
