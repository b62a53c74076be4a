"""Sizes that kernels and their callers agree on: of the pieces that work is cut into, and what kernels are made for."""

from __future__ import annotations

L2_BYTES = 640 << 10
"""Activation rows that are multiplied with one group after the other: as many as stay in half an L2 cache."""
GATED_ROWS = 132
"""Rows of gate and up that are kept in L2 until their product is quantized."""
FEW_ROWS = 16
"""Up to this many rows, gate and up take turns as seldom as there is room: reading them from memory is the limit."""
DOWN_GROUPS = 16
"""Groups of an expert's outputs that are kept in L2, GATED_ROWS rows at a time, until they are added up."""
QUERY_TILE = 192
"""Queries (rows x heads of a KV head) that share a pass over a part: their scores, 2 KB each, stay in L2."""
LEAST_QUERIES = 48
"""So many share it at least, if there are, before more strips are made for more threads."""
SPLIT_ROWS = 32
"""Up to this many rows, attention is split over parts as well."""
TAPS = 4
"""Tokens that the convolution of a layer with a running state sees, the current one included."""
DELTA_COLUMNS = 32
"""Columns of a head's state that are worked on together: 16 KiB of a state of 128 x 128, which stay in L1."""
