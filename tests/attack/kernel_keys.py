"""Keyrings of the kernel, keyctl(2), for programs that have the standard library alone: prepended to snippets.

`KEYS` defines `join()`, which makes a new session keyring, as pam_keyinit does at a login; `add(name, secret)`, which
puts a key into the session keyring; and `take(name)`: what a process reads of a key there, and if it may change it.
"""

KEYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
ADD, KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
SESSION = -3
def join():
    return libc.syscall(KEYCTL, 1, None)
def add(name, secret):
    return libc.syscall(ADD, b"user", name, secret, len(secret), SESSION)
def take(name):
    key = libc.syscall(KEYCTL, 10, SESSION, b"user", name, 0)
    if key < 0:
        return "no key"
    content = ctypes.create_string_buffer(100)
    size = libc.syscall(KEYCTL, 11, key, content, 100)
    changed = libc.syscall(KEYCTL, 2, key, b"CHANGED", 7)
    return f"read {content.raw[:max(size, 0)]!r}, {'changed' if changed == 0 else 'not changed'}"
"""
