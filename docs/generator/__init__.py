"""Writes the reference pages from the code."""
