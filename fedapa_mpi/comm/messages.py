"""What crosses the wire: envelopes of named tensors as one flat buffer.

Nothing here knows MPI. A packed message is one uint8 tensor:

    6 bytes   b"FEDAPA"                     2 bytes   version of this layout
    8 bytes   length of the header          (both numbers little-endian)
    header    zlib-compressed JSON: kind, client, round, note, tensors: [name, dtype, shape, offset]
    zeros     up to the next multiple of 64: the data begin here, offsets count from here
    tensors   each at a multiple of 64, each with its own dtype, zeros in between

The length of the whole is a multiple of 64, so that messages above 2 GiB can be sent as a count of
64-byte blocks. A buffer from `torch.empty` is aligned to 64 bytes on the CPU (more if pinned), and
so is every tensor in it: vectorised kernels treat the edges of unaligned memory differently, and
aligned views keep their results equal however clients are laid out over ranks.
"""

import json
import math
import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

Message = dict[str, Tensor]

BLOCK = 64  # bytes; every tensor starts at a multiple of it
HEADER_LIMIT = 64 * 1024  # bytes, compressed
MAGIC, VERSION = b"FEDAPA", 1

_PREFIX = struct.Struct("<6sHQ")  # magic, version, header length
_KNOWN = (
    "float16 bfloat16 float32 float64 complex64 complex128 bool "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _KNOWN.split()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Kind(IntEnum):
    """What a message is about. The value is its MPI tag."""

    ENLIST = 1  # a rank tells its node and its devices
    BEGIN = 2  # rank 0 tells the configuration and the placement
    SHARD = 3  # a client's data
    HELLO = 4  # what Client.hello says, once
    STATE = 5  # a client's state, to or from a checkpoint
    ORDER = 6  # rank 0 tells what to do next
    DOWNLOAD = 7  # server to client: the method's traffic
    UPLOAD = 8  # client to server: the method's traffic
    DELIVERY = 9  # a download for evaluation only: not counted as traffic
    REPORT = 10  # a rank's losses, scores and seconds
    SIGNAL = 11  # a client rank was asked to stop
    FAILED = 12  # a rank's traceback
    FAREWELL = 13  # how many messages I sent, so that the other side drains them


@dataclass(frozen=True, eq=False)  # no ==: comparing tensors has no single answer
class Envelope:
    """A message with what is written on its outside.

    client  the client it is about, -1 when it is about none
    round   1, 2, ...; 0 before the first
    tensors name -> tensor, any shape and device
    note    small facts that JSON can hold (non-finite floats too); tuples arrive as lists
    """

    kind: Kind
    client: int = -1
    round: int = 0
    tensors: Message = field(default_factory=dict)
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def payload(self) -> int:
        """Bytes of the tensors alone, without header and padding: what counts as traffic."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def pack(envelope: Envelope, pinned: bool = False) -> Tensor:
    """Write an envelope into one new CPU buffer: uint8, 1-D, a multiple of 64 bytes long.

    Each tensor is copied once, from whatever device and layout, straight to its place. `pinned`
    takes page-locked memory, which makes copies from a GPU faster (RuntimeError without one).
    Raises TypeError for a value that is no tensor, ValueError for a dtype the wire does not know,
    a note that JSON cannot hold, or a header above 64 KiB.
    """
    entries, size = _layout(envelope)
    header = _encode(envelope, entries)
    start = _padded(_PREFIX.size + len(header))
    buffer = torch.empty(start + size, dtype=torch.uint8, pin_memory=pinned)
    _write(buffer, 0, _bytes_tensor(_PREFIX.pack(MAGIC, VERSION, len(header)) + header))
    for (*_, offset), tensor in zip(entries, envelope.tensors.values()):
        _write(buffer, start + offset, tensor.detach())
    return buffer


def unpack(buffer: Tensor) -> Envelope:
    """Read a packed buffer; the tensors are views into it, so it must not be reused.

    `buffer` is a contiguous uint8 CPU tensor [n] aligned to 64 bytes and exactly as long as the
    message. Anything else, and a header that does not describe this buffer, raises ValueError.
    The tensors' own bytes carry no checksum: MPI delivers them intact or fails.
    """
    header, start = _read_header(buffer)
    tensors, place = {}, start
    for entry in header["tensors"]:
        name, dtype, shape, offset = _checked_entry(entry)
        size = math.prod(shape) * dtype.itemsize
        if start + offset != place or place + size > len(buffer) or name in tensors:
            raise _damaged(f"tensor {name!r} does not fit at byte {start + offset}")
        tensors[name] = buffer[place : place + size].view(dtype).view(shape)
        place += _padded(size)
    if place != len(buffer):
        raise _damaged(f"it is {len(buffer)} bytes long, its header describes {place}")
    return Envelope(header["kind"], header["client"], header["round"], tensors, header["note"])


def copied(message: Message) -> Message:
    """Do to a message what the wire does: fresh, aligned, detached copies on the CPU.

    The one-process run passes every message through here, so that sender and receiver never
    share memory there either, and what cannot be sent fails there too (errors: see `pack`).
    """
    return unpack(pack(Envelope(Kind.DOWNLOAD, tensors=message))).tensors


def _layout(envelope: Envelope) -> tuple[list[list[Any]], int]:
    """One header entry per tensor, and the bytes that all of them take."""
    entries, offset = [], 0
    for name, tensor in envelope.tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"{envelope.kind.name} message: {name!r} is a {type(tensor).__name__}, expected "
                "a name and a tensor: wrap numbers in torch.tensor(...)"
            )
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{envelope.kind.name} message: tensor {name!r} has dtype {tensor.dtype}, "
                f"expected one of {', '.join(_DTYPES)}: convert it before sending"
            )
        entries.append([name, _NAMES[tensor.dtype], list(tensor.shape), offset])
        offset += _padded(tensor.numel() * tensor.element_size())
    return entries, offset


def _encode(envelope: Envelope, entries: list[list[Any]]) -> bytes:
    kind, client, t, note = envelope.kind, envelope.client, envelope.round, envelope.note
    fields = {"kind": int(kind), "client": client, "round": t, "note": note, "tensors": entries}
    try:
        text = json.dumps(fields, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{kind.name} message of client {client}: JSON cannot hold its note {note!r} "
            f"({error}): use plain numbers, strings, lists and dicts"
        ) from error
    header = zlib.compress(text.encode())
    if len(header) > HEADER_LIMIT:
        raise ValueError(
            f"{kind.name} message of client {client}: the header for {len(entries)} tensors and "
            f"the note takes {len(header)} bytes compressed, at most {HEADER_LIMIT} are allowed: "
            "stack or flatten the tensors into fewer, or shorten the note"
        )
    return header


def _read_header(buffer: Tensor) -> tuple[dict[str, Any], int]:
    """The header's fields, checked, and the byte where the data begin."""
    _check_buffer(buffer)
    magic, version, length = _PREFIX.unpack(buffer[: _PREFIX.size].numpy().tobytes())
    if magic != MAGIC:
        raise ValueError(f"not a fedapa-mpi message: it begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise ValueError(
            f"message layout version {version}, expected {VERSION}: "
            "run the same fedapa-mpi release on all ranks"
        )
    if length > min(HEADER_LIMIT, len(buffer) - _PREFIX.size):
        raise _damaged(f"its header of {length} bytes is longer than allowed or than the message")
    end = _PREFIX.size + length
    return _decode(buffer[_PREFIX.size : end].numpy().tobytes()), _padded(end)


def _check_buffer(buffer: Tensor) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device.type != "cpu":
        raise ValueError(
            f"buffer is {buffer.dtype} {list(buffer.shape)} on {buffer.device}, "
            "expected uint8 [n] on the cpu"
        )
    if len(buffer) == 0 or len(buffer) % BLOCK:
        raise _damaged(f"it is {len(buffer)} bytes long, expected a multiple of {BLOCK}")
    if not buffer.is_contiguous() or buffer.data_ptr() % BLOCK:
        raise ValueError(
            f"buffer is not contiguous at a multiple of {BLOCK} bytes: receive into torch.empty(n)"
        )


def _decode(header: bytes) -> dict[str, Any]:
    stream = zlib.decompressobj()  # its checksum catches flipped bits
    try:
        fields = json.loads(stream.decompress(header))
    except (zlib.error, ValueError, RecursionError) as error:
        raise _damaged(f"its header is unreadable ({error})") from error
    if not stream.eof or stream.unused_data:
        raise _damaged("its header is longer or shorter than it says")
    if not _is_header(fields):
        raise _damaged("its header lacks a field or has one of the wrong type")
    fields["kind"] = Kind(fields["kind"])
    return fields


def _is_header(fields: Any) -> bool:
    return (
        isinstance(fields, dict)
        and fields.keys() == {"kind", "client", "round", "note", "tensors"}
        and all(_is_int(fields[name]) for name in ("kind", "client", "round"))
        and fields["kind"] in set(Kind)
        and isinstance(fields["note"], dict)
        and isinstance(fields["tensors"], list)
    )


def _checked_entry(entry: Any) -> tuple[str, torch.dtype, tuple[int, ...], int]:
    """One [name, dtype, shape, offset] of a header."""
    if not (isinstance(entry, list) and len(entry) == 4 and isinstance(entry[0], str)):
        raise _damaged(f"tensor entry {entry!r} is not [name, dtype, shape, offset]")
    name, dtype, shape, offset = entry
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _damaged(f"tensor {name!r} has dtype {dtype!r}, expected one of {', '.join(_DTYPES)}")
    if not (isinstance(shape, list) and all(_is_int(n) and n >= 0 for n in shape)):
        raise _damaged(f"tensor {name!r} has shape {shape!r}")
    # Strides are products of the sizes other than 0 and must fit torch's 64-bit integers.
    if not _is_int(offset) or math.prod(n for n in shape if n) * 16 >= 2**63:
        raise _damaged(f"tensor {name!r} has shape {shape!r} at {offset!r}")
    return name, _DTYPES[dtype], tuple(shape), offset


def _write(buffer: Tensor, place: int, source: Tensor) -> None:
    """Copy a tensor to a multiple of BLOCK and fill the rest of its last block with zeros."""
    end = place + source.numel() * source.element_size()
    buffer[place:end].view(source.dtype).view(source.shape).copy_(source)
    buffer[end : _padded(end)].zero_()


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _damaged(what: str) -> ValueError:
    return ValueError(
        f"damaged fedapa-mpi message: {what}; check that all ranks run the same release and that "
        "the receive buffer has the size that the probe told"
    )
