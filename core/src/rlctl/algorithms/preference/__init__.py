"""Losses of a chosen against a rejected response, one a module. Pure functions over P pairs.

A response enters as one number: the sum of its tokens' log-probs, or a reward model's score of its last token. What the
token's gradient is follows from the derivative with respect to that number (:mod:`rlctl.algorithms.preference.slopes`).
"""
