"""Directories as version 1 of the format lays them down, byte by byte.

Nothing here imports otbtf_lite or TensorFlow: this file stays as it is when later versions write another form, so that
the directories of version 1 are read for ever.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from crc32c import crc32c

SHARDS = ((0, 1, 2), (3, 4))
"""The samples' numbers. Sample n has ``count`` = n (int64, no dimensions), ``name`` (text: n letters) and ``patch``
(uint16, shape (1, 2, 1), values n and n + 1)."""


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _tensor(dtype: int, shape: tuple[int, ...], *, content: bytes = b"", text: bytes | None = None) -> bytes:
    dims = b"".join(_field(2, b"\x08" + _varint(n)) for n in shape)
    return b"\x08" + _varint(dtype) + _field(2, dims) + (_field(4, content) if text is None else _field(8, text))


def _example(number: int) -> bytes:
    values = {
        b"count": _tensor(9, (), content=struct.pack("<q", number)),
        b"name": _tensor(7, (), text=b"x" * number),
        b"patch": _tensor(17, (1, 2, 1), content=struct.pack("<2H", number, number + 1)),
    }
    entries = (_field(1, _field(1, key) + _field(2, _field(1, _field(1, value)))) for key, value in values.items())
    return _field(1, b"".join(entries))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _shard(name: str, numbers: tuple[int, ...], compression: str | None) -> tuple[bytes, dict[str, Any]]:
    data, sha, crcs = b"", hashlib.sha256(), []
    for number in numbers:
        example = _example(number)
        length = struct.pack("<Q", len(example))
        crcs.append(_masked(example))
        sha.update(length + crcs[-1])
        data += length + _masked(length) + example + crcs[-1]
    if compression:
        data = gzip.compress(data, mtime=0) if compression == "GZIP" else zlib.compress(data)
    first = int.from_bytes(crcs[0], "little")
    return data, {
        "name": name, "records": len(numbers), "bytes": len(data), "digest": sha.hexdigest(), "first_crc": first,
    }  # fmt: skip


def write(folder: Path, compression: str | None = None) -> Path:
    """A finished directory of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for index, numbers in enumerate(SHARDS):
        data, entry = _shard(f"{index}.records", numbers, compression)
        (folder / entry["name"]).write_bytes(data)
        entries.append(entry)
    schema = {
        "count": {"dtype": "int64", "shape": [], "codec": "tensor"},
        "name": {"dtype": "string", "shape": [], "codec": "tensor"},
        "patch": {"dtype": "uint16", "shape": [1, 2, 1], "codec": "tensor"},
    }
    manifest = {
        "version": 1, "schema": schema, "n_samples": 5, "n_samples_per_shard": 3, "compression": compression,
        "seed": 4, "shards": entries, "dropped": {"rejected": {"nodata": 2}},
        "sources": {"patch": {"paths": ["../x.tif"]}}, "versions": {"otbtf-lite": "1.0"},
    }  # fmt: skip
    _json(folder / "output_types.json", {name: each["dtype"] for name, each in schema.items()})
    _json(folder / "output_shapes.json", {name: each["shape"] for name, each in schema.items()})
    _json(folder / "manifest.json", manifest)
    return folder


def write_journal(folder: Path) -> Path:
    """The same, broken off after its first shard."""
    write(folder)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for name in ("manifest.json", "output_types.json", "output_shapes.json", "1.records"):
        (folder / name).unlink()
    settings = {key: manifest[key] for key in ("schema", "n_samples", "n_samples_per_shard", "compression", "seed")}
    lines = [{"journal": 1, "settings": {**settings, "sources": manifest["sources"]}}, manifest["shards"][0]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "manifest.json.partial").write_text(text, encoding="utf-8")
    return folder


def _json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
