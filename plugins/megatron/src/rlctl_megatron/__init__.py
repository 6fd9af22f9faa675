"""rlctl training backend on megatron-core: tensor, sequence, pipeline, context and expert parallel."""
