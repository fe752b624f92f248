"""The numbers that a call returns mean to CUDA, in the same process, the GPUs that were meant.

Each case runs in a process of its own, on a stand-in for CUDA's library (`stand_in_cuda.c`) whose fastest-first order
is not the PCI order. CUDA is asked after gpulease has answered, in the same process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.client.stand_in_cuda import Card, Cuda, machine

SLOW = Card("aa110000000000000000000000000000", speed=1)
FAST = Card("ab220000000000000000000000000000", speed=9)
FASTER = Card("cc330000000000000000000000000000", speed=10)
SPLIT = Card("dd440000000000000000000000000000", speed=5, kind="m")
SPLIT_BARE = Card("ee550000000000000000000000000000", speed=5, kind="u")
STRANGE = Card("ff660000000000000000000000000000", speed=7)
MIXED = (SLOW, FAST, FASTER)
"""In PCI order; CUDA's own order is the reverse."""
Look = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    return Cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def look(cuda: Cuda) -> Look:
    def one(cards: tuple[Card, ...] = MIXED, library: Cuda = cuda, **how: Any) -> dict[str, Any]:
        (result,) = library.look([case(cards, **how)])
        return result

    return one


def case(
    cards: tuple[Card, ...],
    mask: str | None = None,
    order: str | None = None,
    *,
    initialised: bool = False,
    changed: dict[str, str | None] | None = None,
    known: tuple[Card, ...] | None = None,
    **variables: str,
) -> dict[str, Any]:
    """`known`: what the daemon knows, if that is not the machine. `changed`: variables, after CUDA may have started."""
    return {
        "environment": {
            "STAND_IN_CUDA": machine(*cards),
            "CUDA_VISIBLE_DEVICES": mask,
            "CUDA_DEVICE_ORDER": order,
            **variables,
        },
        "initialised": initialised,
        "changed": changed or {},
        "gpus": [card.as_the_daemon_knows_it(i) for i, card in enumerate(cards if known is None else known)],
    }


def means(result: dict[str, Any], *cards: Card | None) -> bool:
    """True when gpulease said that these are visible in this order, and CUDA says so too; None is not the daemon's."""
    uuids = [card and card.uuid for card in cards]
    assert "refused" not in result, result
    assert result["devices"] == uuids, result
    assert len(result["shown"]) == len(uuids), result
    assert all(said == true for said, true in zip(uuids, result["shown"], strict=True) if said), result
    return not result["called"]


@pytest.mark.parametrize(
    ("mask", "order", "visible"),
    [
        (None, None, (SLOW, FAST, FASTER)),
        (None, "PCI_BUS_ID", (SLOW, FAST, FASTER)),
        (None, "FASTEST_FIRST", (FASTER, FAST, SLOW)),
        (None, "pci_bus_id", (FASTER, FAST, SLOW)),
        ("2,0", None, (FASTER, SLOW)),
        ("2,0", "FASTEST_FIRST", (SLOW, FASTER)),
        ("0,9,1", "FASTEST_FIRST", (FASTER,)),
        ("", "FASTEST_FIRST", ()),
        ("-1", None, ()),
        ("NoDevFiles", None, ()),
        (f"{FASTER.uuid},GPU-aa", "FASTEST_FIRST", (FASTER, SLOW)),
        ("GPU-a", None, ()),
    ],
)
def test_before_cuda_is_initialized_the_environment_counts(look: Look, mask, order, visible) -> None:
    assert means(look(mask=mask, order=order), *visible)


@pytest.mark.parametrize("order", [None, "PCI_BUS_ID", "FASTEST_FIRST"])
@pytest.mark.parametrize("mask", [None, "2,0", FAST.uuid])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"CUDA_VISIBLE_DEVICES": "1,0"},
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "MIG-1"},
        {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"},
    ],
)
def test_once_cuda_is_initialized_the_environment_at_that_time_counts(look: Look, mask, order, changed) -> None:
    in_order = MIXED if order == "PCI_BUS_ID" else MIXED[::-1]
    visible = {None: in_order, "2,0": (in_order[2], in_order[0]), FAST.uuid: (FAST,)}[mask]
    assert means(look(mask=mask, order=order, initialised=True, changed=changed), *visible)


@pytest.mark.parametrize("reads", ["strict", "lax"])
@pytest.mark.parametrize(
    "mask",
    ["0,0", "1, 2", "+1", "1gpu", f"{FAST.uuid}, {SLOW.uuid}", FAST.uuid.upper(), f"{FAST.uuid},0", f"0,{FAST.uuid}"],
)
def test_an_undocumented_mask_is_read_as_the_driver_reads_it(look: Look, mask: str, reads: str) -> None:
    result = look(mask=mask, STAND_IN_READS=reads)
    assert result["devices"] == result["shown"]
    assert not result["called"]


def test_a_gpu_that_cuda_hides_shifts_no_ordinal(cuda: Cuda) -> None:
    lost = case((SLOW, FASTER), known=MIXED)
    lost["gpus"][1]["health"] = "lost"
    (result,) = cuda.look([lost])
    assert means(result, SLOW, FASTER)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The file system of a machine with three GPUs, whose minor numbers are in PCI order."""
    (tmp_path / "dev").mkdir()
    for number in (0, 1, 2):
        (tmp_path / f"dev/nvidia{number}").touch()
    return tmp_path


def on(root: Path, one: dict[str, Any], *minor_numbers: int) -> dict[str, Any]:
    for number, gpu in zip(minor_numbers, one["gpus"], strict=True):
        gpu["minor_number"] = number
    return one | {"root": str(root)}


@pytest.mark.parametrize("mask", [None, "0,1,2"])
def test_a_device_file_of_an_unknown_gpu_has_cuda_queried(cuda: Cuda, root: Path, mask) -> None:
    (result,) = cuda.look([on(root, case((SLOW, STRANGE, FASTER), mask, known=(SLOW, FASTER)), 0, 2)])
    assert means(result, SLOW, None, FASTER)


def test_full_uuids_are_never_ambiguous(cuda: Cuda, root: Path) -> None:
    mask = f"{FASTER.uuid},{SLOW.uuid}"
    one = case((SLOW, STRANGE, FASTER), mask, known=(SLOW, FASTER), STAND_IN_FAILS="999")  # which would be noticed
    (result,) = cuda.look([on(root, one, 0, 2)])
    assert means(result, FASTER, SLOW)


@pytest.mark.parametrize("pipes", [None, "/run/pipes"])
@pytest.mark.parametrize(("mask", "asked"), [("2", True), (None, True), (FASTER.uuid, False), ("", False)])
def test_cuda_is_queried_if_an_mps_daemon_may_renumber(cuda: Cuda, root: Path, pipes, mask, asked: bool) -> None:
    directory = root / (pipes or "/tmp/nvidia-mps").lstrip("/")
    directory.mkdir(parents=True)
    (directory / "control").touch()
    variables = {"CUDA_MPS_PIPE_DIRECTORY": pipes} if pipes else {}
    # Left to itself, gpulease would not notice that CUDA fails.
    one = on(root, case(MIXED, mask, "PCI_BUS_ID", STAND_IN_FAILS="999", **variables), 0, 1, 2)
    (result,) = cuda.look([one])
    assert ("There is an MPS control daemon" in result.get("refused", "")) is asked


@pytest.mark.parametrize("initialised", [False, True])
def test_a_device_unknown_to_the_daemon_keeps_its_ordinal(look: Look, initialised: bool) -> None:
    known = (SLOW, FASTER)
    result = look((STRANGE, *known), order="FASTEST_FIRST", initialised=initialised, known=known)
    assert means(result, FASTER, None, SLOW)
    assert result["ordinals"] == [0, 2]


def test_devices_that_are_all_unknown_to_the_daemon_are_refused(look: Look) -> None:
    refused = look((STRANGE,), initialised=True, known=MIXED)["refused"]
    assert refused.startswith(f"UnknownOrdinals: CUDA shows this process {STRANGE.uuid}, and the daemon leases none")


@pytest.mark.parametrize("flags", [(), ("OLD",)], ids=["driver tells slices", "driver tells their GPU"])
@pytest.mark.parametrize("initialised", [False, True])
def test_a_mig_slice_is_never_taken_for_its_gpu(tmp_path: Path, look: Look, initialised: bool, flags) -> None:
    library = Cuda(tmp_path, *flags)
    cards = (SPLIT, SLOW, SPLIT_BARE, FAST)
    assert means(look(cards, library, order="PCI_BUS_ID", initialised=initialised), None, SLOW, FAST)
    assert "MIG slices" in look((SPLIT,), library, initialised=initialised)["refused"]


def test_a_mig_slice_unknown_to_the_daemon_is_not_taken_for_its_gpu(look: Look) -> None:
    """The daemon's reading is older. The UUID that CUDA tells is the slice's."""
    not_yet_known = Card(SPLIT.digits, SPLIT.speed)
    assert means(look((SPLIT, SLOW), initialised=True, known=(not_yet_known, SLOW)), None, SLOW)


@pytest.mark.parametrize("mask", ["MIG-aa", "MIG-GPU-aa/1/2", "MIG-aa,MIG-bb", "0,MIG-aa", " mig-aa"])
def test_a_mask_with_a_mig_slice_is_refused(look: Look, mask: str) -> None:
    refused = look(mask=mask)["refused"]
    assert "names the MIG slice" in refused
    assert "gpulease leases whole GPUs" in refused


@pytest.mark.parametrize(
    ("fails", "story"),
    [
        ("999", "CUDA was asked, and cuInit answers with error 999"),
        ("dies", "the process that asked it ended with code -6: the driver fell over"),
    ],
)
def test_a_failing_query_in_an_ambiguous_case_is_refused(look: Look, fails: str, story: str) -> None:
    refused = look(order="FASTEST_FIRST", STAND_IN_FAILS=fails)["refused"]
    assert story in refused
    assert "Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in refused


def test_a_query_that_hangs_times_out(cuda: Cuda) -> None:
    program = """
import os, time
from gpulease.cuda import libcuda
begun = time.monotonic()
try:
    libcuda.query_devices(os.environ, within_s=0.5)
except libcuda.CudaError as error:
    print(error)
print(time.monotonic() - begun < 5)
os.wait()
"""
    begun = time.monotonic()
    ran = cuda.python(program, STAND_IN_FAILS="hang", STAND_IN_CUDA=machine(*MIXED))
    assert ran.stdout.splitlines() == ["it did not answer within 0.5 s", "True"], ran.stderr
    assert "ChildProcessError" in ran.stderr, "a process was left behind"
    assert time.monotonic() - begun < 30


def test_without_libcuda_and_gpus_an_undocumented_mask_is_read_as_in_torch(root: Path, tmp_path: Path) -> None:
    library = Cuda(tmp_path)
    library.is_missing()
    program = """
import sys
from pathlib import Path
from gpulease_protocol.model import Gpu, GpuState
from gpulease.cuda.ordinals import visible_gpus
gpus = [Gpu(uuid=f"GPU-{i}", node="a", index=i, name=str(i), minor_number=i, state=GpuState.FREE) for i in range(3)]
try:
    print([gpu.index for gpu in visible_gpus(gpus, root=Path(sys.argv[1])).gpus])
except RuntimeError as error:
    print(error)
"""
    bare = str(tmp_path / "a machine without GPUs")
    assert library.python(program, bare, CUDA_VISIBLE_DEVICES="2gpu, 1").stdout == "[2, 1]\n"
    for place, variable, value, remedy in (
        (bare, "CUDA_DEVICE_ORDER", "FASTEST_FIRST", "Set CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (str(root), "CUDA_VISIBLE_DEVICES", "2gpu, 1", "by full UUID"),
    ):
        refused = library.python(program, place, **{variable: value}).stdout
        assert "CUDA cannot be asked: " in refused
        assert remedy in refused


def test_the_environment_counts_in_a_child_forked_after_cuda_was_initialized(cuda: Cuda) -> None:
    """CUDA cannot be used there: error 3 from everything. What the child starts obeys the environment."""
    program = f"""
import os, subprocess, sys, using_cuda
from gpulease_protocol.model import Gpu, GpuState
from gpulease.cuda.ordinals import visible_gpus
assert using_cuda.init() == 0
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
child = os.fork()
if not child:
    assert using_cuda.init() == 3
    gpus = [Gpu(uuid=uuid, node="a", index=i, state=GpuState.FREE) for i, uuid in enumerate({[c.uuid for c in MIXED]})]
    visible = visible_gpus(gpus, simulated=True)
    print([gpu.uuid for gpu in visible.gpus], visible.fix_ordinals([gpus[1].uuid]), flush=True)
    subprocess.run([sys.executable, "-c", "import using_cuda; print(using_cuda.shown())"], check=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    ran = cuda.python(program, STAND_IN_CUDA=machine(*MIXED))
    assert ran.stdout.splitlines() == [f"['{FAST.uuid}'] [0]", f"['{FAST.uuid}']"], ran.stderr


def test_cuda_initialized_during_the_wait_decides(cuda: Cuda) -> None:
    program = f"""
import using_cuda
from gpulease_protocol.model import Gpu, GpuState
from gpulease.cuda.ordinals import visible_gpus
gpus = [Gpu(uuid=uuid, node="a", index=i, state=GpuState.FREE) for i, uuid in enumerate({[c.uuid for c in MIXED]})]
visible = visible_gpus(gpus, simulated=True)
using_cuda.init()  # in CUDA's own order: the reverse
import os
print(visible.fix_ordinals([gpus[0].uuid]), os.environ.get("CUDA_DEVICE_ORDER"))
"""
    ran = cuda.python(program, STAND_IN_CUDA=machine(*MIXED))
    assert ran.stdout == "[2] None\n", ran.stderr


def test_setting_the_mask_orders_the_gpus_and_is_refused_after_initialization(cuda: Cuda) -> None:
    program = f"""
import os, using_cuda
from gpulease import MaskLatched
from gpulease.cuda.ordinals import check_mask_changeable, set_mask
check_mask_changeable()
set_mask({[FASTER.uuid, SLOW.uuid]})
print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"])
print(using_cuda.shown())
for late in check_mask_changeable, lambda: set_mask(["GPU-1"]):
    try:
        late()
    except MaskLatched as error:
        print(error, os.environ["CUDA_VISIBLE_DEVICES"].count("GPU-1"))
"""
    ran = cuda.python(program, STAND_IN_CUDA=machine(*MIXED), CUDA_DEVICE_ORDER="FASTEST_FIRST")
    lines = ran.stdout.splitlines()
    assert lines[:2] == [f"{FASTER.uuid},{SLOW.uuid} PCI_BUS_ID", f"['{FASTER.uuid}', '{SLOW.uuid}']"], ran.stderr
    assert [line.startswith("CUDA is initialized in this process") for line in lines[2:]] == [True, True]
    assert lines[3].endswith(" 0")


def any_mask(rng: random.Random, cards: list[Card]) -> str | None:
    """Mostly what people write, sometimes what they should not."""
    if rng.random() < 0.15:
        return None
    uuids = [card.uuid for card in cards]
    by_index = [str(rng.randrange(len(cards) + 1)) for _ in range(rng.randrange(5))]
    by_uuid = rng.sample(uuids, rng.randrange(len(uuids) + 1))
    prefixes = [uuid[: rng.randrange(4, 12)] for uuid in by_uuid]
    entries = rng.choice([by_index, list(dict.fromkeys(by_index)), by_uuid, prefixes, by_index + by_uuid])
    odd = ["-1", "", " 1", "+0", "2x", "GPU-", uuids[0].upper(), f" {uuids[-1]}", "NoDevFiles"]
    if rng.random() < 0.3:
        entries.insert(rng.randrange(len(entries) + 1), rng.choice(odd))
    return ",".join(entries)


def any_case(rng: random.Random) -> dict[str, Any]:
    digits = [f"{rng.choice('ab')}{rng.choice('ab')}{rng.randrange(16**30):030x}" for _ in range(rng.randrange(1, 6))]
    cards = [Card(text, rng.randrange(4), rng.choice("ggggggmu")) for text in digits]
    orders = (None, "", "PCI_BUS_ID", "FASTEST_FIRST", "SOMETHING")
    changed = {"CUDA_VISIBLE_DEVICES": any_mask(rng, cards), "CUDA_DEVICE_ORDER": rng.choice(orders)}
    initialised, mask = rng.random() < 0.4, any_mask(rng, cards)
    # cuInit fails where it may show nothing, and has then read nothing for good; so that a GPU that is not known
    # moves a number only where CUDA tells them.
    all_known = not initialised or mask is not None or all(card.kind == "u" for card in cards)
    return case(
        tuple(cards),
        mask,
        rng.choice(orders),
        initialised=initialised,
        changed=changed if rng.random() < 0.5 else None,
        known=tuple(card for card in cards if all_known or rng.random() < 0.8),
        STAND_IN_READS=rng.choice(("strict", "lax")),
    )


@pytest.mark.parametrize("seed", range(4))
def test_an_ordinal_means_the_same_gpu_to_cuda_for_any_mask_order_and_machine(cuda: Cuda, seed: int) -> None:
    rng = random.Random(seed)
    cases = [any_case(rng) for _ in range(60)]
    results = cuda.look(cases)
    assert len(results) == len(cases)
    answered = 0
    for one, result in zip(cases, results, strict=True):
        story = f"{one}\n{result}"
        assert result["called"] == [], story
        whole = {gpu["uuid"] for gpu in one["gpus"] if gpu["health"] == "ok"}
        if "refused" in result:
            assert not whole & set(result["shown"]), story
            continue
        answered += bool(result["devices"])
        assert [uuid if uuid in whole else None for uuid in result["shown"]] == result["devices"], story
    assert answered > 20
