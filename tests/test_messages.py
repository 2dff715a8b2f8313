"""messages.py: what is packed comes out again, and nothing else does."""

import json
import math
import struct
import sys
import zlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedapa_mpi.comm.messages import BLOCK, HEADER_LIMIT, Envelope, Kind, copied, pack, unpack
from fedapa_mpi.comm.orders import Action, Order

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def bits(tensor):
    """Everything that a tensor is, NaN patterns included, as something that == compares."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def facts(envelope):
    """An envelope as something that == compares; the note as text, where NaN equals NaN."""
    tensors = [(name, bits(tensor)) for name, tensor in envelope.tensors.items()]
    return envelope.kind, envelope.client, envelope.round, tensors, json.dumps(envelope.note)


@st.composite
def tensors(draw):
    """Random bytes seen as any dtype and shape, sometimes transposed or with gaps."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    step = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = math.prod(shape) * step
    if dtype == torch.bool:
        flat = torch.randint(0, 2, (size,), generator=generator).bool()
    else:
        raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator)
        flat = raw.to(torch.uint8).view(dtype)
    tensor = flat[::step].view(shape) if step == 1 else flat.view([*shape, step])[..., 0]
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
envelopes = st.builds(
    Envelope,
    kind=st.sampled_from(Kind),
    client=st.integers(-1, 10**6),
    round=st.integers(0, 10**9),
    tensors=st.dictionaries(st.text(max_size=12), tensors(), max_size=5),
    note=st.dictionaries(st.text(max_size=6), json_values, max_size=3),
)


@given(envelopes)
def test_what_is_packed_comes_out_again(envelope):
    buffer = pack(envelope)
    assert buffer.dtype == torch.uint8
    assert len(buffer) % BLOCK == 0
    assert facts(unpack(buffer)) == facts(envelope)


@given(envelopes)
def test_tensors_are_aligned_views_of_the_buffer(envelope):
    buffer = pack(envelope)
    end = buffer.data_ptr() + len(buffer)
    for tensor in unpack(buffer).tensors.values():
        assert tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() % BLOCK == 0
            assert buffer.data_ptr() < tensor.data_ptr() < end


@given(envelopes)
def test_no_byte_is_left_to_chance(
    envelope,
):
    def dirty_empty(*size, **options):
        return real_empty(*size, **options).fill_(0xA5)

    clean, real_empty = pack(envelope), torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", dirty_empty)
        assert torch.equal(pack(envelope), clean)


@given(envelopes, st.data())
def test_a_damaged_header_is_refused_or_harmless(envelope, data):
    """Prefix, header and its padding: wherever a byte changes, no garbage comes out."""
    buffer = pack(envelope)
    header_end = 16 + struct.unpack("<Q", buffer[8:16].numpy().tobytes())[0]
    place = data.draw(st.integers(0, header_end - 1))
    buffer[place] ^= data.draw(st.integers(1, 255))
    try:
        result = unpack(buffer)
    except ValueError:
        return
    assert facts(result) == facts(envelope)


@given(envelopes, st.data())
def test_a_message_of_another_length_is_refused(envelope, data):
    buffer = pack(envelope)
    cut = data.draw(st.integers(0, len(buffer) - 1))
    for wrong in (buffer[:cut], torch.cat([buffer, torch.zeros(BLOCK, dtype=torch.uint8)])):
        with pytest.raises(ValueError, match="damaged"):
            unpack(wrong.clone())


@given(st.binary(max_size=300))
def test_noise_is_refused(noise):
    buffer = torch.zeros(-(-len(noise) // BLOCK) * BLOCK, dtype=torch.uint8)
    buffer[: len(noise)] = torch.tensor(list(noise), dtype=torch.uint8)
    with pytest.raises(ValueError):
        unpack(buffer)


def forged(size=BLOCK, **changes):
    """A message with a valid checksum and a header that lies."""
    fields = {"kind": 7, "client": 0, "round": 1, "note": {}, "tensors": []}
    header = zlib.compress(json.dumps(dict(fields, **changes)).encode())
    buffer = torch.zeros(-(-(16 + len(header)) // BLOCK) * BLOCK + size, dtype=torch.uint8)
    text = struct.pack("<6sHQ", b"FEDAPA", 1, len(header)) + header
    buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return buffer


def test_the_forger_can_also_tell_the_truth():
    envelope = unpack(forged(tensors=[["x", "float32", [2, 3], 0]]))
    assert torch.equal(envelope.tensors["x"], torch.zeros(2, 3))


@pytest.mark.parametrize(
    "entries",
    [
        [["x", "float32", [2, 3], 8]],
        [["x", "float32", [2, 3], -64]],
        [["x", "float32", [2, 3], 64]],
        [["x", "float32", [17], 0]],
        [["x", "float32", [-1], 0]],
        [["x", "float32", [1.5], 0]],
        [["x", "float32", [True], 0]],
        [["x", "float32", 3, 0]],
        [["x", "float32", [0, 2**62, 4], 0]],
        [["x", "float8", [3], 0]],
        [["x", ["float32"], [3], 0]],
        [[5, "float32", [3], 0]],
        [["x", "float32", [3]]],
        ["float32"],
        [["x", "float32", [3], 0], ["y", "float32", [3], 0]],
        [["x", "float32", [0], 0], ["x", "float32", [3], 0]],
        {"x": 1},
        None,
    ],
)
def test_headers_that_lie_about_tensors_are_refused(entries):
    with pytest.raises(ValueError, match="damaged"):
        unpack(forged(tensors=entries))


@pytest.mark.parametrize(
    "changes",
    [{"kind": 99}, {"kind": "7"}, {"client": "a"}, {"round": None}, {"note": []}, {"b": 1}],
)
def test_headers_with_wrong_facts_are_refused(changes):
    with pytest.raises(ValueError, match="damaged"):
        unpack(forged(size=0, **changes))


@pytest.mark.parametrize("change", [-1, -4, 1, 40])
def test_a_wrong_header_length_is_refused(change):
    """Even where all of the text can be read: without its checksum, or with zeros behind it."""
    buffer = forged(tensors=[["x", "float32", [2], 0]])
    length = buffer[8:16].view(torch.int64)
    length += change
    with pytest.raises(ValueError, match="damaged"):
        unpack(buffer)


def test_strangers_and_other_versions_are_told_apart():
    buffer = pack(Envelope(Kind.HELLO))
    stranger, newer = buffer.clone(), buffer.clone()
    stranger[0], newer[6] = 0, 2
    with pytest.raises(ValueError, match="not a fedapa-mpi message"):
        unpack(stranger)
    with pytest.raises(ValueError, match="version 2, expected 1"):
        unpack(newer)


def test_buffers_of_the_wrong_sort_are_refused():
    buffer = pack(Envelope(Kind.HELLO))
    with pytest.raises(ValueError, match="expected uint8"):
        unpack(buffer.view(torch.int8))
    with pytest.raises(ValueError, match="expected uint8"):
        unpack(buffer.view(-1, BLOCK))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), buffer])[1:]
    with pytest.raises(ValueError, match="multiple of 64"):
        unpack(shifted)


def test_payload_counts_tensor_bytes_only():
    message = {"w": torch.zeros(3, 5), "ids": torch.arange(4), "on": torch.tensor(True)}
    assert Envelope(Kind.UPLOAD, 3, 1, message, {"why": "test"}).payload == 3 * 5 * 4 + 4 * 8 + 1
    assert Envelope(Kind.UPLOAD).payload == 0


def test_non_finite_numbers_survive_in_a_note():
    note = {"loss": [math.nan, math.inf, -math.inf, 0.1]}
    loss = unpack(pack(Envelope(Kind.REPORT, note=note))).note["loss"]
    assert math.isnan(loss[0])
    assert loss[1:] == note["loss"][1:]


def test_gradients_do_not_travel():
    weight = torch.nn.Parameter(torch.ones(3))
    result = copied({"w": weight})["w"]
    assert not result.requires_grad
    assert type(result) is torch.Tensor


def test_copied_shares_no_memory():
    source = torch.zeros(4)
    result = copied({"w": source})
    source += 1
    assert result["w"].tolist() == [0, 0, 0, 0]


def test_each_tensor_takes_whole_blocks():
    message = {"a": torch.zeros(16), "b": torch.zeros(17), "c": torch.zeros(())}
    views = unpack(pack(Envelope(Kind.UPLOAD, tensors=message))).tensors
    places = [view.data_ptr() for view in views.values()]
    assert [b - a for a, b in pairwise(places)] == [64, 128]


def test_a_header_above_the_limit_names_the_number_of_tensors():
    generator = torch.Generator().manual_seed(1)
    names = torch.randint(0, 2**62, (8000,), generator=generator).tolist()
    message = {str(name): torch.zeros(0) for name in names}
    with pytest.raises(ValueError, match=f"8000 tensors.*at most {HEADER_LIMIT}"):
        pack(Envelope(Kind.UPLOAD, 3, 1, message))


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"'n' is a int.*torch\.tensor"):
        pack(Envelope(Kind.UPLOAD, 3, 1, {"n": 5}))
    with pytest.raises(ValueError, match=r"'w' has dtype torch\.float8"):
        pack(Envelope(Kind.UPLOAD, 3, 1, {"w": torch.zeros(2).to(torch.float8_e4m3fn)}))
    with pytest.raises(ValueError, match="REPORT message of client 3: JSON cannot hold"):
        pack(Envelope(Kind.REPORT, 3, 1, note={"x": torch.zeros(1)}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_device_tensors_go_through_one_pinned_buffer():
    source = torch.arange(12.0, device="cuda").view(3, 4).t()
    buffer = pack(Envelope(Kind.UPLOAD, 0, 1, {"w": source}), pinned=True)
    assert buffer.is_pinned()
    assert torch.equal(unpack(buffer).tensors["w"], source.cpu())


def test_tags_are_positive_and_all_different():
    assert [int(kind) for kind in Kind] == list(range(1, 14))


def test_messages_do_not_need_mpi():
    assert "mpi4py" not in sys.modules


def test_turns_in_parallel_are_one_ascending_group():
    order = Order(Action.ROUND, 4, clients=(5, 2, 9), dropped=frozenset({2}))
    assert order.turns() == ((2, 5, 9),)
    assert order.answering(order.turns()[0]) == (5, 9)


def test_turns_in_sequence_keep_the_order_drawn():
    order = Order(Action.ROUND, 4, clients=(5, 2, 9), dropped=frozenset({2}), sequential=True)
    assert order.turns() == ((5,), (2,), (9,))
    assert [order.answering(turn) for turn in order.turns()] == [(5,), (), (9,)]


@pytest.mark.parametrize("sequential", [False, True])
def test_without_clients_there_are_no_turns(sequential):
    assert Order(Action.STOP, 4, sequential=sequential).turns() == ()


@st.composite
def orders(draw):
    ids = st.lists(st.integers(0, 30), unique=True, max_size=8)
    clients = draw(ids)
    others = [[i for i in draw(ids) if i not in clients] for _ in range(3)]
    dropped = draw(st.frozensets(st.sampled_from(clients))) if clients else frozenset()
    return Order(
        draw(st.sampled_from(Action)),
        draw(st.integers(0, 1000)),
        tuple(clients),
        dropped,
        draw(st.sampled_from([(), ("recv",), ("post",), ("recv", "post")])),
        tuple(others[0]),
        tuple(others[1]),
        tuple(others[2]),
        draw(st.booleans()),
    )


@given(orders())
def test_an_order_survives_the_wire(order):
    envelope = unpack(pack(Envelope(Kind.ORDER, note=order.note())))
    result = Order.from_note(envelope.note)
    assert result == order
    assert isinstance(result.dropped, frozenset)
    assert isinstance(result.action, Action)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": "dance"}, "dance"),
        ({"round": -1}, "round is -1"),
        ({"round": True}, "round is True"),
        ({"clients": [1, 1]}, "clients is"),
        ({"clients": [-1]}, "clients is"),
        ({"clients": ["1"]}, "clients is"),
        ({"clients": "12"}, "expected a list"),
        ({"dropped": [7]}, "dropped is"),
        ({"dropped": [[1]]}, "dropped is"),
        ({"points": ["never"]}, "points is"),
        ({"points": [["recv"]]}, "points is"),
        ({"held": [1]}, "held is"),
        ({"delivered": [2]}, "delivered is"),
        ({"sequential": 1}, "sequential is 1"),
        ({"extra": 1}, "extra"),
    ],
)
def test_contradictory_orders_are_refused(changes, message):
    note = Order(Action.ROUND, 1, clients=(1, 2)).note()
    with pytest.raises(ValueError, match=message):
        Order.from_note(dict(note, **changes))


def test_an_order_with_a_missing_field_is_refused():
    with pytest.raises(ValueError, match="expected"):
        Order.from_note({"action": "stop", "round": 1})
