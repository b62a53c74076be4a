"""Slash commands: the registry, and the commands by what they are about."""
