"""rlctl FSDP2 backend."""
