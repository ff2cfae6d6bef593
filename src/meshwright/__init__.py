"""Trains a model over data x tensor x pipeline parallel ranks with ZeRO, and says beforehand what that will cost."""

__version__ = "0.1.0"
