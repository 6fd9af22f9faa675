"""A stand-in for Ascend's MindSpeed. For tests."""
