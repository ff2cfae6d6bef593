"""Layers and states that are cut over an axis of the mesh."""
