"""Low-rank adapters (LoRA) on this backend, by peft's layers. peft is imported where a run asks for adapters, nowhere else.

:mod:`.inject` puts them into a model, :mod:`.merge` takes them out again on the way to a rollout or a file, :mod:`.effect` finds
adapters that change nothing, :mod:`.directory` writes what ``PeftModel.from_pretrained`` reads.

Paper: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models": ``y = W x + (alpha / r) B (A x)``, B zero at first.
"""
