"""A program of eve's that listens where a daemon is expected, tells what it is sent, and answers as a daemon would.

`python impostor.py ADDRESS... LEASE DESIRED`: each address is a port of loopback, `[::1]:PORT`, or the path of a Unix
socket; the two answers are files. It prints `listens ADDRESS` or `refused ADDRESS`, then what arrives.
"""

import socket
import sys
import threading

*ADDRESSES, LEASE, DESIRED = sys.argv[1:]
BEARER = "authorization"


def serve(connection: socket.socket) -> None:
    """Answer the requests of one client."""
    print("connected", flush=True)
    stream = connection.makefile("rwb")
    while line := stream.readline():
        size = 0
        print("asked", line.decode().strip(), flush=True)
        while (header := stream.readline()).strip():
            name, _, value = header.decode().partition(":")
            if name.lower() == BEARER:
                print("was sent", value.strip(), flush=True)
            if name.lower() == "content-length":
                size = int(value)
        stream.read(size)
        path = line.split()[1]
        with open(DESIRED if path.endswith(b"/exchange") else LEASE, "rb") as file:
            body = file.read()
        head = f"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stream.write(head.encode() + body)
        stream.flush()


def listen(address: str) -> None:
    """Listen at an address until the end."""
    host, _, port = address.rpartition(":")
    family = socket.AF_UNIX if "/" in address else socket.AF_INET6 if "[" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address if family == socket.AF_UNIX else (host.strip("[]"), int(port)))
    except OSError:
        print("refused", address, flush=True)
        return
    listening.listen()
    print("listens", address, flush=True)
    while True:
        threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


for one in ADDRESSES:
    threading.Thread(target=listen, args=(one,)).start()
