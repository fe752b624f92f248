"""`lazy_dataclass` makes the same classes as the standard library, later."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpulease_protocol import lazy_dataclass
from gpulease_protocol.holder import Holder


class Plain:
    """A class with a field that none of the methods compares, one that each instance makes, and a constant."""

    name: str
    sizes: list[int] = dataclasses.field(default_factory=list)
    note: str = dataclasses.field(default="", compare=False, repr=False)
    LIMIT: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if len(self.sizes) > self.LIMIT:
            raise ValueError("too many sizes")


OPTIONS: dict[str, dict[str, Any]] = {
    "changeable": {"slots": True},
    "frozen": {"slots": True, "frozen": True, "kw_only": True},
    "by identity": {"slots": True, "frozen": True, "eq": False},
    "with a dictionary": {"frozen": True},
}


def results(make: Callable[..., Any], options: dict[str, Any]) -> list[object]:
    """What instances of a class do; an error is a result."""
    namespace = {name: value for name, value in vars(Plain).items() if name not in ("__dict__", "__weakref__")}
    kind = make(**options)(type("Plain", (), {**namespace, "__qualname__": "Plain"}))
    below = make(**options)(type("Below", (kind,), {"__annotations__": {"more": "int"}, "more": 1}))
    other_kind = type("Other", (kind,), {})
    one, other, third = kind(name="a"), kind(name="a", note="n"), kind(name="b", sizes=[1])

    def change() -> None:
        one.name = "c"

    def delete() -> None:
        del third.name

    asked: list[Callable[[], object]] = [
        lambda: (one.sizes, one.sizes is not other.sizes, one.LIMIT),
        lambda: (one == other, one != third, one == "a", one == kind(name="a")),
        lambda: (hash(one) == hash(other), {one: 1}),
        lambda: (repr(one), repr(below(name="a", more=2))),
        lambda: (below(name="a") == below(name="a"), below(name="a") == one, below(name="a").more),
        lambda: kind("a", [1, 2]).sizes,
        kind,
        lambda: kind(name="a", other=1),
        lambda: kind(name="a", sizes=[1, 2, 3, 4]),
        lambda: dataclasses.replace(third, name="c").sizes,
        lambda: copy.copy(third).sizes,
        lambda: (dataclasses.asdict(third), dataclasses.is_dataclass(kind), kind.__match_args__, kind.__slots__),
        change,
        delete,
        lambda: below(name="a").__setattr__("more", 2),
        lambda: (one.name, third.name),
        lambda: (type(one) is kind, sorted(kind.__init__.__annotations__), kind.__init__.__qualname__),
        lambda: (other_kind(name="a").sizes, type(other_kind(name="a")) is other_kind),
        lambda: other_kind(name="a").__setattr__("name", "b"),
    ]
    found: list[object] = []
    for ask in asked:
        try:
            found.append(ask())
        except Exception as error:
            found.append(error)
    return found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_class_does_what_one_of_the_standard_library_does(options: dict[str, Any]) -> None:
    for ours, theirs in zip(
        results(lazy_dataclass.dataclass, options), results(dataclasses.dataclass, options), strict=True
    ):
        assert repr(ours) == repr(theirs)


def test_a_frozen_noun_survives_pickle() -> None:
    holder = Holder(user="ada", label="sweep")
    assert pickle.loads(pickle.dumps(holder)) == holder


def test_a_method_is_written_once_and_before_a_fork_all_are() -> None:
    @lazy_dataclass.dataclass(frozen=True)
    class Local:
        number: int

    before = Local.__init__
    assert Local(1).number == 1
    assert Local.__init__ is not before
    methods = Local.__init__, Local.__eq__
    lazy_dataclass.write_methods()
    assert Local.__init__ is methods[0]
    assert Local.__eq__ is not methods[1]
    assert not lazy_dataclass._UNWRITTEN[Local]


def test_threads_that_make_the_first_instances_all_get_one() -> None:
    @lazy_dataclass.dataclass(frozen=True)
    class Local:
        number: int

    made: list[Local] = []
    threads = [threading.Thread(target=lambda: made.append(Local(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert len(made) == 8


def test_every_package_makes_its_dataclasses_with_it() -> None:
    standard = re.compile(r"^from dataclasses import .*\bdataclass\b", re.MULTILINE)
    root = Path(lazy_dataclass.__file__).parents[2]
    modules = [path for folder in ("protocol", "client", "worker", "server") for path in root.glob(f"{folder}/**/*.py")]
    found = [path.name for path in modules if standard.search(path.read_text())]
    assert len(modules) > 100
    assert found == []
