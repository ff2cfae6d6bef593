"""Models, as lists of layers that take a tensor group, and their cut into stages."""
