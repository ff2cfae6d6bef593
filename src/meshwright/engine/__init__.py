"""Runs a lowered program on one rank."""
