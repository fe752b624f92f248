"""Trials in blocks of `usable_cuda_devices`, by the kinds of workers that share a process or do not."""

from __future__ import annotations

import json

TRIALS = 12

TRIAL = """
import gpulease, json, os, sys, time

def trial(number, devices):
    number += int(sys.argv[2])
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    for kind in ("begin", "end"):
        os.write(log, json.dumps([kind, number, devices]).encode() + b"\\n")
        time.sleep(0.05)
    os.close(log)
    return devices
"""
"""Writes down when it has its GPUs, in a file that all processes share; its number counts from the second argument."""

RUNNERS = {
    "threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(6) as pool:
    list(pool.map(gpulease.on_gpus(1)(trial), range(12)))
""",
    "processes": """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
train = gpulease.on_gpus(1)(trial)
def call(number):
    return train(number)
with ProcessPoolExecutor(6, get_context("fork")) as pool:
    list(pool.map(call, range(12)))
""",
    "tasks": """
import asyncio
@gpulease.on_gpus(1)
async def train(number, devices):
    return await asyncio.to_thread(trial, number, devices)
async def main():
    await asyncio.gather(*map(train, range(12)))
asyncio.run(main())
""",
}
"""Each runs its trials in six workers or more."""


def check_no_overlap(log: str, trials: int) -> None:
    """Every trial has ended, and none had a GPU of another that was running."""
    running: dict[int, list[int]] = {}
    for line in log.splitlines():
        kind, number, devices = json.loads(line)
        if kind == "begin":
            assert not set(devices) & {one for others in running.values() for one in others}, log
            running[number] = devices
        else:
            del running[number]
            trials -= 1
    assert (running, trials) == ({}, 0), log
