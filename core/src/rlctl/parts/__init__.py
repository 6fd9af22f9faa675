"""What training engines are built of, for whoever writes one: parts that name no backend.

Packed rows and their slices (:mod:`~rlctl.parts.segments`, :mod:`~rlctl.parts.ulysses`, :mod:`~rlctl.parts.layout`),
attention over them (:mod:`~rlctl.parts.attention`), the model's head and per-token numbers (:mod:`~rlctl.parts.head`,
:mod:`~rlctl.parts.reader`, :mod:`~rlctl.parts.routing`), a loss inside a model's forward (:mod:`~rlctl.parts.job`), results
(:mod:`~rlctl.parts.outputs`), ranks (:mod:`~rlctl.parts.ranks`, :mod:`~rlctl.parts.agreement`), and what rests on the host
(:mod:`~rlctl.parts.offload`). They need torch, some also transformers: a plugin's dependencies, not core's. Engines import
them; nothing else of core does.
"""
