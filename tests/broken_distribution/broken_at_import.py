"""A plugin whose own dependency is missing."""

raise ImportError("No module named 'expensive_library'")
