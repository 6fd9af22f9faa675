"""Pure tensor maths of RL post-training; one algorithm a file, named after its paper."""
