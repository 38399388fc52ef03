"""Helpers shared by the tests: processes as ranks, leak checks, references. See launcher.py."""
