"""rlctl training backend on VeOmni."""
