"""Answers that take long: event streams, followed logs, long polls."""
