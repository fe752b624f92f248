"""The daemon: a ledger of leases that agrees with the hardware, behind a REST API.

Imports go downward only: `main > api > runtime > store > core`.
"""
