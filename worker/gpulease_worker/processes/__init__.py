"""Processes on this node: who they are, which lease they belong to, and how they are ended."""
