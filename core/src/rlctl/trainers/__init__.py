"""The loops. They know roles and the Engine facade, never a backend."""
