"""Amounts as people read them: counted things, and bytes."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 token`, `3,020 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: int) -> str:
    """`98.4 MB`, `1.12 GB`: decimal units, as hubs and file managers show them."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
