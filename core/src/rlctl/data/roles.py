"""Roles of messages. Standard library only."""

ROLES = ("system", "developer", "user", "assistant", "tool")
