"""Data: files or procedural tasks to rows, rows to tokens, completions to rewards. No module here imports torch.

``rows`` reads, ``prompts`` encodes, ``sampler`` draws batches, ``rewards`` scores, ``check`` looks at it all beforehand.
"""
