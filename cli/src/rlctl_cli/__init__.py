"""rlctl command line."""
