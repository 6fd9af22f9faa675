"""What each role of an algorithm asks of an engine. Roles know the Engine facade, never a backend."""
