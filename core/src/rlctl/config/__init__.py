"""The configuration of a run: strict schema, loading with origins, overrides, recipes."""
