"""The rlctl plugin for megatron-core on Ascend NPUs, patched by MindSpeed."""
