"""Groups of processes along the axes of the mesh: start-up, collectives, messages, and what they cost."""
