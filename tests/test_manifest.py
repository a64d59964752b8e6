from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otbtf_lite import manifest
from otbtf_lite.errors import DataError, InputError
from otbtf_lite.manifest import JOURNAL, MANIFEST, Journal, Manifest, Shard
from otbtf_lite.schema import Feature, Schema
from otbtf_lite.storage import Directory

SHARDS = (Shard("0.records", 3, 100, "ab" * 32, 7), Shard("10.records", 2, 70, "cd" * 32, (1 << 32) - 1))
FULL = Manifest(
    Schema({"xs": Feature("uint8", (2, 2, 1)), "\u00e9": Feature("string", ())}), SHARDS, "GZIP", 4, 3,
    {"remainder": 1}, {"sources": {"xs": {"paths": ["a.tif"]}}}, {"numpy": "2.5.0", "gdal": "3.6.2"},
)  # fmt: skip

GOLDEN = """\
{
  "version": 1,
  "schema": {
    "x": {
      "dtype": "uint8",
      "shape": [
        2
      ],
      "codec": "tensor"
    }
  },
  "n_samples": 3,
  "n_samples_per_shard": 3,
  "compression": null,
  "seed": 4,
  "shards": [
    {
      "name": "0.records",
      "records": 3,
      "bytes": 100,
      "digest": "abababababababababababababababababababababababababababababababab",
      "first_crc": 7
    }
  ],
  "dropped": {},
  "from": "na\\u00efve",
  "versions": {
    "gdal": "3.6.2",
    "numpy": "2.5.0"
  }
}
"""


def changed(**changes: Any) -> bytes:
    data = json.loads(FULL.to_bytes())
    data.update(changes)
    return json.dumps({key: value for key, value in data.items() if value != "gone"}).encode()


def shard(**changes: Any) -> dict[str, Any]:
    return {**SHARDS[0].to_json(), **changes}


def test_a_manifest_has_one_form() -> None:
    """These bytes are a format: data sets that were written are read for ever."""
    one = Manifest(
        Schema({"x": Feature("uint8", (2,))}), SHARDS[:1], None, 4, 3, {}, {"from": "na\u00efve"},
        {"numpy": "2.5.0", "gdal": "3.6.2"},
    )  # fmt: skip
    assert one.to_bytes().decode() == GOLDEN
    assert Manifest.from_bytes(GOLDEN.encode(), "m") == one


def test_a_manifest_is_read_back() -> None:
    assert Manifest.from_bytes(FULL.to_bytes(), "m") == FULL
    assert FULL.n_samples == 5
    least = changed(
        seed="gone", n_samples_per_shard=None, compression="gone", dropped="gone", versions="gone", sources="gone"
    )
    assert Manifest.from_bytes(least, "m") == Manifest(FULL.schema, SHARDS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"version": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[]", "must be a JSON object, got list"),
        (changed(version="gone"), "no valid version number: None"),
        (changed(version=True), "no valid version number: True"),
        (changed(version=0), "no valid version number: 0"),
        (changed(version="1"), "no valid version number: '1'"),
        (changed(version=2), "of version 2: this otbtf-lite reads up to version 1, get a newer one"),
        (changed(schema={}), "no valid schema: A schema needs at least one feature"),
        (changed(schema={"x": {"dtype": "u", "shape": [], "codec": "tensor"}}), "feature 'x': Unknown element type"),
        (changed(schema={"x": {"dtype": "bool", "shape": [], "codec": "zip"}}), "Unknown codec 'zip'"),
        (changed(shards=[]), "lists no shards"),
        (changed(shards={"0": shard()}), "lists no shards"),
        (changed(shards=[5]), "a shard must be a JSON object"),
        (changed(shards=[shard(name="../0.records")]), "named '../0.records': only plain names"),
        (changed(shards=[shard(name="/etc/passwd")]), "only plain names"),
        (changed(shards=[shard(name=0)]), "only plain names"),
        (changed(shards=[shard(digest="AB" * 32)]), "the digest of 0.records is no SHA-256"),
        (changed(shards=[shard(digest=None)]), "the digest of 0.records is no SHA-256"),
        (changed(shards=[shard(records=0)]), "0.records: records must be an integer from 1"),
        (changed(shards=[shard(bytes=-1)]), "0.records: bytes must be an integer"),
        (changed(shards=[shard(records=1 << 63)]), "0.records: records must be an integer"),
        (changed(shards=[shard(first_crc=1 << 32)]), "0.records: first_crc must be an integer from 0 to 4294967295"),
        (changed(shards=[shard(records=1.0)]), "records must be an integer"),
        (changed(shards=[shard(), shard()]), "once each in numeric order"),
        (changed(shards=[shard(name="10.records"), shard(name="9.records")]), "once each in numeric order"),
        (changed(n_samples=6), "says 6 samples, but its shards add up to 5"),
        (changed(n_samples=5.0), "n_samples must be an integer"),
        (changed(seed="x"), "seed must be an integer"),
        (changed(seed=-1), "seed must be an integer"),
        (changed(n_samples_per_shard=0), "n_samples_per_shard must be an integer"),
        (changed(compression="BZIP2"), "unknown compression: 'BZIP2'"),
        (changed(compression=["GZIP"]), "unknown compression"),
        (changed(dropped=[]), "dropped must be a JSON object"),
        (changed(versions=None), "versions must be a JSON object"),
    ],
)
def test_anything_else_is_refused_with_the_files_name(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^dir/manifest.json.*{message}"):
        Manifest.from_bytes(data, "dir/manifest.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab0.", max_size=3),
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text("ab", max_size=2), each, max_size=2),
    max_leaves=4,
)
PLACES = [
    ["version"], ["schema"], ["schema", "xs"], ["schema", "xs", "shape"], ["schema", "xs", "shape", 0], ["n_samples"],
    ["shards"], ["shards", 0], ["shards", 1, "name"], ["shards", 1, "records"], ["compression"], ["seed"], ["dropped"],
    ["versions"], ["sources"], ["sources", "xs", "paths"],
]  # fmt: skip


@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_is_read_or_a_data_error(place: list[Any], value: Any) -> None:
    data = json.loads(FULL.to_bytes())
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        read = Manifest.from_bytes(json.dumps(data).encode(), "m")
    except DataError:
        return
    assert read.n_samples == 5


@given(st.integers(0, 2000), st.binary(max_size=3))
def test_any_damage_is_read_or_a_data_error(at: int, data: bytes) -> None:
    whole = FULL.to_bytes()
    at %= len(whole)
    with contextlib.suppress(DataError):
        Manifest.from_bytes(whole[:at] + data + whole[at + 1 :], "m")
    with contextlib.suppress(DataError):
        Journal.from_bytes(whole[:at] + data + whole[at + 1 :], "m")


def journal(*shards: Shard) -> bytes:
    return Journal({"seed": 4}).head() + b"".join(map(Journal.entry, shards))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_journal_is_read_back_whatever_it_was_cut_in(n: int) -> None:
    whole = journal(*SHARDS[:n])
    assert Journal.from_bytes(whole, "j") == Journal({"seed": 4}, list(SHARDS[:n]))
    for torn in range(1, len(Journal.entry(SHARDS[0]))):
        data = whole + Journal.entry(SHARDS[0])[:torn]
        assert Journal.from_bytes(data, "j") == Journal({"seed": 4}, list(SHARDS[:n]))


def test_a_complete_manifest_under_the_journals_name_is_told_apart() -> None:
    assert Journal.from_bytes(FULL.to_bytes(), "j") == FULL


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: nothing can be resumed. Write again with overwrite"),
        (b'{"journal": 1', "is empty"),
        (b"5\n", "must be a JSON object"),
        (b'{"journal": 2, "settings": {}}\n', "journal of version 2; this otbtf-lite resumes version 1"),
        (b'{"journal": 1}\n', "must be a JSON object, got NoneType"),
        (journal() + b"\n", "is not valid JSON"),
        (journal() + b'{"name": "../0.records"}\n', "only plain names"),
    ],
)
def test_another_journal_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^dir/j.*{message}"):
        Journal.from_bytes(data, "dir/j")


def test_a_directory_is_finished_by_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(tmp_path)
    assert manifest.load_manifest(directory) is None
    assert manifest.load_journal(directory) is None
    directory.write(JOURNAL, journal(SHARDS[0]))
    states: list[tuple[bool, type]] = []
    replace = os.replace

    def watched(old: str, new: str) -> None:
        replace(old, new)
        found = manifest.load_journal(directory)
        states.append(((tmp_path / MANIFEST).exists(), type(found)))

    monkeypatch.setattr(os, "replace", watched)
    manifest.commit(directory, FULL)
    assert states == [(False, Manifest), (True, type(None))]
    assert manifest.load_manifest(directory) == FULL
    assert os.listdir(tmp_path) == [MANIFEST]  # noqa: PTH208  # all names, once


@pytest.mark.parametrize("content", [b"", journal(), FULL.to_bytes()], ids=["empty", "journal", "manifest"])
def test_a_directory_with_a_journal_is_unfinished_whatever_else_it_holds(tmp_path: Path, content: bytes) -> None:
    directory = Directory(tmp_path)
    directory.write(MANIFEST, FULL.to_bytes())
    directory.write(JOURNAL, content)
    with pytest.raises(DataError, match=r"is unfinished \(manifest.json.partial is there\): .* resume.* overwrite"):
        manifest.load_manifest(directory)


def test_an_absurdly_long_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match="has 1099511627776 bytes, more than"):
        manifest.load_manifest(Directory(tmp_path))


@pytest.mark.parametrize(
    ("path", "base", "expected"),
    [
        ("/data/in/a.tif", "/data/out", "../in/a.tif"),
        ("/data/out/a.tif", "/data/out/", "a.tif"),
        ("/data/out/../in/a.tif", "/data/out", "../in/a.tif"),
        ("/other/a.tif", "/data/out", "a.tif"),
        ("/data/a.tif", "gs://bucket/out", "a.tif"),
        ("gs://bucket/a.tif", "/data/out", "gs://bucket/a.tif"),
        ("/vsis3/bucket/a.tif", "/data/out", "/vsis3/bucket/a.tif"),
    ],
)
def test_paths_are_relative_so_that_folders_can_move(path: str, base: str, expected: str) -> None:
    details = {"sources": {"xs": {"paths": [path], "crs": path}}, "list": [{"paths": (path,)}], "paths": "text"}
    assert manifest.relative_paths(details, base) == {
        "sources": {"xs": {"paths": [expected], "crs": path}}, "list": [{"paths": [expected]}], "paths": "text",
    }  # fmt: skip


def test_relative_paths_count_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert manifest.relative_paths({"paths": ["in/a.tif"]}, "out") == {"paths": ["../in/a.tif"]}
    assert manifest.relative_paths({"paths": ["in/a.tif"]}, str(tmp_path)) == {"paths": ["in/a.tif"]}


def test_details_are_what_is_read_back() -> None:
    """A resumed run compares them with the journal's: keys are text there, and tuples lists."""
    assert manifest.checked_details({"classes": {1: "water"}, "t": (1, 2.5)}, "/x") == {
        "classes": {"1": "water"},
        "t": [1, 2.5],
    }


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"x": float("nan")}, "must be JSON values"),
        ({"x": object()}, "must be JSON values"),
        ({"x": {1, 2}}, "must be JSON values"),
        ({"seed": 1, "shards": 2}, "can't be named 'seed', 'shards'"),
    ],
)
def test_other_details_are_refused(details: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        manifest.checked_details(details, "/x")
