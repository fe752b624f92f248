"""The standing attack: two users who do not trust each other, on one host with a daemon that is root.

ada uses gpulease as it is meant to be used. eve has a login on the same host, and nothing else: eve may call the API,
run programs, open sockets, fill /proc, and name anything in an environment. Each test is one attempt of eve to start,
stop, slow, read, impersonate or pin what belongs to ada or to root. The section "What another user can do"
in docs/security.md says which test stands for which attempt.

Both are real users to the kernel, in a network and mount namespace (`tests.attack.host`) where the daemon has its
default port, directory and socket. The tests look at the daemon from outside only, so that they hold for any
implementation. What is generated from the OpenAPI document (`test_routes`), from the files on disk (`test_files`) and
from /proc (`test_processes`) meets new routes, fields, files and processes by itself.
"""
