"""The colours of the benchmarks' pictures."""

from __future__ import annotations

INK, PAPER, FAINT, GRID = "#1b1f24", "#ffffff", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#dc7018", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04")
