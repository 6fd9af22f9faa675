"""Other Python interpreters, in which roles of a run may live: found, asked what they can do, and started.

A pool of processes has one interpreter (``runtime.pools.NAME.python``; a role's own ``python`` is short for that). What an
interpreter has is asked of that interpreter, in a child (:mod:`rlctl.interpreters.asking`), and its answers are plain data:
nothing of another environment is imported here. Imports no torch.
"""
