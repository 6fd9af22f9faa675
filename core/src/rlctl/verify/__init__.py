"""Parity of a backend and topology against one process: what ``rlctl verify`` runs.

The reference (:mod:`rlctl.verify.reference`) is plain Hugging Face code. What is under test goes the whole way that training
goes: controller, worker group, engine facade, hooks.
"""
