"""Ids from a file, one after the other, however large it is: text, CSV, Parquet or Arrow."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.errors import RequestError

COLUMN = "vin"
"""The column that has them, if there is one of that name; else the first."""
ARROW = (".arrow", ".arrows", ".feather", ".ipc")
ROWS_AT_ONCE = 10_000
STDIN = "-"


class Ids:
    """The ids of one file. `done` of `total` were read, in `unit`s."""

    def __init__(self, path: str):
        self._path, self._kind = path, "" if path == STDIN else Path(path).suffix.lower()
        self.unit = "rows" if self._kind == ".parquet" or self._kind in ARROW else "bytes"
        self.total: int | None = None
        self.done = 0
        try:
            self._file: BinaryIO = sys.stdin.buffer if path == STDIN else open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise RequestError(f"cannot read ids from {path}: {error.strerror}") from error

    def __enter__(self) -> Ids:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path != STDIN:
            self._file.close()

    def __iter__(self) -> Iterator[str]:
        if self.unit == "rows":
            yield from self._rows()
        elif self._kind in (".csv", ".tsv"):
            yield from self._csv("\t" if self._kind == ".tsv" else ",")
        else:
            yield from filter(None, (line.strip() for line in self._lines()))

    def _lines(self) -> Iterator[str]:
        if self._path != STDIN:
            self.total = os.fstat(self._file.fileno()).st_size
        for number, line in enumerate(self._file, 1):
            self.done += len(line)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise RequestError(f"{self._path}: line {number} is not UTF-8: {error.reason}") from error

    def _csv(self, delimiter: str) -> Iterator[str]:
        at: int | None = None
        rows = csv.reader(self._lines(), delimiter=delimiter, strict=True)
        try:
            for row in rows:
                if at is None:
                    names = [name.strip().lower() for name in row]
                    at = names.index(COLUMN) if COLUMN in names else 0
                    if COLUMN in names:
                        continue
                if len(row) <= at or not row[at].strip():
                    if any(row):
                        raise RequestError(f"{self._path}: line {rows.line_num} has no {COLUMN}")
                    continue
                yield row[at].strip()
        except csv.Error as error:
            raise RequestError(f"{self._path}: line {rows.line_num} is not CSV: {error}") from error

    def _rows(self) -> Iterator[str]:
        import pyarrow as pa

        try:
            for batch in self._batches():
                name = COLUMN if COLUMN in batch.schema.names else batch.schema.names[0]
                found = batch.column(name).cast(pa.string()).to_pylist()
                for vin in found:
                    if not vin:
                        raise RequestError(f"{self._path}: a row has no {name}")
                    yield vin
                self.done += len(found)
        except (pa.ArrowException, IndexError, OSError) as error:
            raise RequestError(f"cannot read ids from {self._path}: {error}") from error

    def _batches(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._kind == ".parquet":
            whole = pq.ParquetFile(self._file)
            self.total = whole.metadata.num_rows
            names = whole.schema_arrow.names
            wanted = [COLUMN] if COLUMN in names else names[:1]
            return whole.iter_batches(ROWS_AT_ONCE, columns=wanted)
        if self._file.read(6) == b"ARROW1":  # the file format; else the stream format
            reader = pa.ipc.open_file(self._file)
            return (reader.get_batch(number) for number in range(reader.num_record_batches))
        self._file.seek(0)
        return pa.ipc.open_stream(self._file)
