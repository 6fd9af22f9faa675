"""What a configuration comes to before anything is launched: ranks, batches, refusals, memory, backends. Pure Python.

Nothing here imports torch or a backend. What a backend can do and how it keeps a model comes from its record and from the
catalogue; what a model looks like comes from its ``config.json``.
"""
