"""Helpers shared by the tests: processes as ranks (launcher.py), leak checks, references."""
