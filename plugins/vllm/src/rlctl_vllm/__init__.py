"""The ``vllm`` rollout backend of rlctl."""
